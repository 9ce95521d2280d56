"""ChatML as text, for what a checkpoint's own template cannot show: tools and tool calls in the Hermes style."""

from __future__ import annotations

from collections.abc import Sequence

from miles_core.session.hermes import inline_calls, inline_tools
from miles_core.types import Message, Tool

START, END = "<|im_start|>", "<|im_end|>"
OPENER = f"{START}assistant\n"


def turns(messages: Sequence[Message]) -> str:
    """Every message as one closed turn."""
    return "".join(f"{START}{message.role}\n{message.content}{END}\n" for message in inline_calls(messages))


def conversation(messages: Sequence[Message], tools: Sequence[Tool], default_system: str | None) -> str:
    """A whole conversation; tools go into the system turn, which is written when there is none."""
    messages = list(messages)
    if default_system is not None and messages[:1] and messages[0].role != "system":
        messages.insert(0, Message(role="system", content=default_system))
    return turns(inline_tools(messages, tools) if tools else messages)
