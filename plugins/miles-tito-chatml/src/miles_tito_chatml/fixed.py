"""ChatML as text, for what a checkpoint's own template cannot show: tools and tool calls in the Hermes style."""

from __future__ import annotations

import json
from collections.abc import Sequence

from miles_core.session.hermes import spell_tool_calls
from miles_core.types import Message, Tool

START, END = "<|im_start|>", "<|im_end|>"
OPENER = f"{START}assistant\n"


def turns(messages: Sequence[Message]) -> str:
    """Every message as one closed turn."""
    return "".join(
        f"{START}{message.role}\n{spell_tool_calls(message.content, message.tool_calls)}{END}\n" for message in messages
    )


def conversation(messages: Sequence[Message], tools: Sequence[Tool], default_system: str | None) -> str:
    """A whole conversation; tools go into the system turn, which is written when there is none."""
    messages = list(messages)
    if not messages or messages[0].role != "system":
        if default_system is None and not tools:
            return turns(messages)
        messages.insert(0, Message(role="system", content=default_system or ""))
    if tools:
        head = messages[0].content
        content = f"{head}\n\n{_tools(tools)}" if head else _tools(tools)
        messages[0] = Message(role="system", content=content)
    return turns(messages)


def _tools(tools: Sequence[Tool]) -> str:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You can call functions. Each line between the tags describes one as JSON:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call a function, write its name and arguments as JSON between tags, one block per call:\n"
        '<tool_call>\n{"name": "<function name>", "arguments": {"<argument>": "<value>"}}\n</tool_call>'
    )
