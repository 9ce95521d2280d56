"""Tool calls as Hermes-style models write them in text: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

Parsing never fails: what is no well-formed call stays in the text, and the arguments keep the exact characters the
model wrote, since a call that went through a JSON library is another text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from miles_core.types import Message, Tool, ToolCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


def parse_tool_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Split an assistant turn's text into what was said and what was called.

    Returns:
        The text without the well-formed calls (stripped when there are any, otherwise untouched), and the calls,
        numbered ``call_0``, ``call_1``, ... within the turn.
    """
    calls: list[ToolCall] = []
    kept: list[str] = []
    end = close = 0
    # From closing tag to closing tag, so that a model stuck on opening tags costs linear time.
    while (close := text.find(_CLOSE, close)) >= 0:
        start = text.rfind(_OPEN, end, close)
        call = None if start < 0 else _call(text[start + len(_OPEN) : close], f"call_{len(calls)}")
        close += len(_CLOSE)
        if call is not None:
            kept.append(text[end:start])
            calls.append(call)
            end = close
    if not calls:
        return text, ()
    return "".join([*kept, text[end:]]).strip(), tuple(calls)


def spell_tool_calls(content: str, calls: Sequence[ToolCall]) -> str:
    """The inverse: content, then one block per call, arguments verbatim."""
    blocks = [_spell(call) for call in calls]
    return "\n".join([content, *blocks] if content else blocks)


def inline_calls(messages: Sequence[Message]) -> list[Message]:
    """The messages with tool calls written into their content, for templates that do not show them."""
    return [
        replace(message, content=spell_tool_calls(message.content, message.tool_calls), tool_calls=())
        for message in messages
    ]


def inline_tools(messages: Sequence[Message], tools: Sequence[Tool], *, system: str = "") -> list[Message]:
    """The messages with the tools described in the system message, for templates that do not show them.

    Args:
        system: Content of the system message where the conversation has none.
    """
    found = list(messages)
    if not found or found[0].role != "system":
        found.insert(0, Message(role="system", content=system))
    head = found[0].content
    found[0] = replace(found[0], content=f"{head}\n\n{_describe(tools)}" if head else _describe(tools))
    return found


def _describe(tools: Sequence[Tool]) -> str:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You can call functions. Each line between the tags describes one as JSON:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call a function, write its name and arguments as JSON between tags, one block per call:\n"
        '<tool_call>\n{"name": "<function name>", "arguments": {"<argument>": "<value>"}}\n</tool_call>'
    )


def _spell(call: ToolCall) -> str:
    name = json.dumps(call.name, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {call.arguments or "{}"}}}\n</tool_call>'


def _call(body: str, call_id: str) -> ToolCall | None:
    try:
        members = _members(body)
        name = json.loads(members["name"])
    except (ValueError, KeyError, RecursionError):
        return None
    arguments = members.get("arguments", "{}")
    if arguments.startswith('"'):
        arguments = json.loads(arguments)  # some models write the object as a string that holds JSON
    return ToolCall(id=call_id, name=name, arguments=arguments) if isinstance(name, str) and name else None


def _members(body: str) -> dict[str, str]:
    """Key -> exact source text of its value, for a JSON object.

    Raises:
        ValueError: not one well-formed object with distinct keys.
    """
    at = _expect(body, _skip(body, 0), "{")
    found: dict[str, str] = {}
    at = _skip(body, at)
    while body[at : at + 1] != "}":
        if found:
            at = _skip(body, _expect(body, at, ","))
        key, at = _DECODER.raw_decode(body, at)
        if not isinstance(key, str) or key in found:
            raise ValueError("not a distinct key")
        start = _skip(body, _expect(body, _skip(body, at), ":"))
        _, at = _DECODER.raw_decode(body, start)
        found[key] = body[start:at]
        at = _skip(body, at)
    if _skip(body, at + 1) != len(body):
        raise ValueError("text after the object")
    return found


def _skip(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


def _expect(text: str, at: int, char: str) -> int:
    if text[at : at + 1] != char:
        raise ValueError(f"expected {char!r} at {at}")
    return at + 1
