"""The `miles` command: a lazy group, so that each command pays only for itself."""

from __future__ import annotations

import click

from miles_core import __version__
from miles_core.cli.lazy import LazyCommand, LazyGroup

COMMANDS = {
    "init": LazyCommand("miles_core.cli.init:command", "Write a commented run-file for what is installed."),
    "plugins": LazyCommand("miles_core.cli.plugins:command", "List, explain, check and create plugins."),
    "validate": LazyCommand("miles_core.cli.validate:command", "Report every problem of a run-file at once."),
    "schema": LazyCommand("miles_core.cli.schema:command", "Print the JSON schema of a run-file."),
    "train": LazyCommand("miles_core.cli.train:command", "Run, or show the plan with --dry-run."),
    "plan": LazyCommand("miles_core.cli.plan:command", "Forecast memory, weight updates and overlap."),
    "bench": LazyCommand("miles_core.cli.bench:command", "Measure transports on these machines."),
    "check": LazyCommand("miles_core.cli.check:command", "Test this machine step by step, and say which part fails."),
    "tito": LazyCommand("miles_core.cli.tito:command", "Prove a token family on a checkpoint, or write one."),
    "inspect": LazyCommand("miles_core.cli.inspect:command", "Show a trajectory of a run, token by token."),
    "doctor": LazyCommand("miles_core.cli.doctor:command", "Say which contract of a run is broken, and what to try."),
    "report": LazyCommand("miles_core.cli.report:command", "Write a run's report as one self-contained page."),
    "delta": LazyCommand("miles_transports.delta.cli:group", "Look at, verify and apply published weight versions."),
    "serve": LazyCommand("miles_core.cli.serve:command", "Serve sessions to agents over HTTP, without training."),
    "convert": LazyCommand("miles_core.cli.convert:command", "Turn a checkpoint into a Hugging Face folder."),
}

FIRST_FIVE = ("init", "validate", "train", "inspect", "report")


class Miles(LazyGroup):
    """The top group; bare `miles` shows the five commands people need."""

    def bare_text(self, ctx: click.Context) -> str:
        width = max(map(len, FIRST_FIVE))
        lines = [f"  miles {name.ljust(width)}   {self.lazy[name].summary}" for name in FIRST_FIVE]
        return "\n".join([f"Miles {__version__}", "", *lines, "", "miles --help lists all commands."])


main = Miles(
    "miles", lazy=COMMANDS, help="Reinforcement-learning post-training where rollout and trainer are one policy."
)
main = click.version_option(__version__, prog_name="miles")(main)
