"""`miles tito`: prove a token family on a checkpoint, or write one for it."""

from __future__ import annotations

from miles_core.cli.lazy import LazyCommand, LazyGroup

COMMANDS = {
    "check": LazyCommand("miles_core.cli.tito_check:command", "Prove a token family on a checkpoint's tokenizer."),
    "new": LazyCommand("miles_core.cli.tito_new:command", "Write a token family for a tokenizer folder, with tests."),
}

command = LazyGroup("tito", lazy=COMMANDS, help="Work with token families: messages to tokens, append-only.")
