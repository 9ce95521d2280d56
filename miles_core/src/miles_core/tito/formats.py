"""How models spell tool calls between a pair of tags, and how a history shows them.

A format reads the text between its tags and writes calls the way the checkpoint's template does. Reading never
repairs: what is no well-formed call is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from miles_core.tito.arguments import Unfinished, bare, joined, members, properties, shown_members, typed
from miles_core.types import Tool, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call as the model wrote it; most models give it no id."""

    name: str
    arguments: str
    id: str | None = None


class CallFormat(Protocol):
    """Spelling of tool calls."""

    @property
    def opening(self) -> str:
        """Tag before one call or a section of calls; empty when a call is the whole reply."""
        ...

    @property
    def closing(self) -> str: ...

    def read(self, body: str, tools: Sequence[Tool]) -> Sequence[Call]:
        """The calls that the text between the tags spells, at least one.

        Raises:
            Unfinished: the closing tag stands inside a value; the call goes on behind it.
            ValueError: no well-formed call.
        """
        ...

    def write(self, calls: Sequence[ToolCall], *, content: bool) -> str:
        """The calls with their tags and the white space around them.

        Args:
            content: Whether anything was said before them.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonBlocks:
    """``<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>``, one block a call (Hermes, Qwen)."""

    opening: str = "<tool_call>"
    closing: str = "</tool_call>"
    before: str = "\n"
    """Between content and the first block."""
    between: str = "\n"
    arguments_key: str = "arguments"

    def read(self, body: str, tools: Sequence[Tool]) -> Sequence[Call]:
        return [read_json_call(body, self.arguments_key)]

    def write(self, calls: Sequence[ToolCall], *, content: bool) -> str:
        blocks = (
            f'{self.opening}\n{{"name": {json.dumps(call.name, ensure_ascii=False)}, '
            f'"{self.arguments_key}": {call.arguments or "{}"}}}\n{self.closing}'
            for call in calls
        )
        return (self.before if content else "") + self.between.join(blocks)


def read_json_call(body: str, arguments_key: str) -> Call:
    """One call spelled as ``{"name": ..., arguments_key: {...}}``.

    Raises:
        ValueError: no such object; `Unfinished` where more text could make it one.
    """
    found = members(body)
    if "name" not in found:
        raise ValueError("a call without a name")
    name, arguments = json.loads(found["name"]), found.get(arguments_key, "{}")
    if arguments.startswith('"'):
        arguments = json.loads(arguments)  # some models write the object as a string that holds JSON
    if not isinstance(name, str) or not name:
        raise ValueError("a call without a name")
    return Call(name=name, arguments=arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTags:
    """``<tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>\\n</tool_call>``.

    Values are bare text, so their types come from the tool's schema.
    """

    opening: str = "<tool_call>"
    closing: str = "</tool_call>"
    before: str = "\n\n"
    between: str = "\n"
    after: str = ""

    def read(self, body: str, tools: Sequence[Tool]) -> Sequence[Call]:
        head = re.match(r"\s*<function=([^>\n]+)>\n?", body)
        if head is None:
            raise ValueError("no <function=...>")
        name = head[1].strip()
        text = _without_end(body[head.end() :], "</function>")
        schema = properties(tools, name)
        parts: dict[str, str] = {}
        for key, value in _tagged(text, re.compile(r"\s*<parameter=([^>\n]+)>\n?"), "</parameter>"):
            if key in parts:
                raise ValueError("a parameter twice")
            parts[key] = typed(value.removesuffix("\n"), schema.get(key))
        return [Call(name=name, arguments=joined(parts))]

    def write(self, calls: Sequence[ToolCall], *, content: bool) -> str:
        blocks = (
            f"{self.opening}\n<function={call.name}>\n{self._parameters(call)}</function>\n{self.closing}"
            for call in calls
        )
        return (self.before if content else "") + self.between.join(blocks) + self.after

    def _parameters(self, call: ToolCall) -> str:
        shown = shown_members(call.arguments).items()
        return "".join(f"<parameter={key}>\n{bare(value, python=True)}\n</parameter>\n" for key, value in shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class InvokeTags:
    """A section of ``<invoke name="NAME">`` elements with one ``<parameter name="KEY">`` each argument (MiniMax)."""

    opening: str
    closing: str
    before: str = "\n"

    def read(self, body: str, tools: Sequence[Tool]) -> Sequence[Call]:
        calls = []
        for name, inner in _tagged(body, re.compile(r'\s*<invoke name="([^"\n]+)">\n?'), "</invoke>"):
            schema = properties(tools, name)
            found = _tagged(inner, re.compile(r'\s*<parameter name="([^"\n]+)">'), "</parameter>")
            calls.append(Call(name=name, arguments=joined(_distinct(found, schema))))
        if not calls:
            raise ValueError("no call")
        return calls

    def write(self, calls: Sequence[ToolCall], *, content: bool) -> str:
        invokes = "".join(f'<invoke name="{call.name}">\n{self._parameters(call)}</invoke>\n' for call in calls)
        return f"{self.before}{self.opening}\n{invokes}{self.closing}"

    def _parameters(self, call: ToolCall) -> str:
        shown = shown_members(call.arguments).items()
        return "".join(f'<parameter name="{key}">{bare(value, python=False)}</parameter>\n' for key, value in shown)


def _distinct(found: Sequence[tuple[str, str]], schema: Mapping[str, object]) -> dict[str, str]:
    parts = {key: typed(value, schema.get(key)) for key, value in found}
    if len(parts) != len(found):
        raise ValueError("a parameter twice")
    return parts


def _tagged(text: str, opening: re.Pattern[str], closing: str) -> list[tuple[str, str]]:
    """(name, inner text) of consecutive elements with only white space around them.

    Raises:
        Unfinished: an element is not closed.
        ValueError: other text.
    """
    found: list[tuple[str, str]] = []
    at = 0
    while text[at:].strip():
        head = opening.match(text, at)
        if head is None:
            raise ValueError("text between elements")
        end = text.find(closing, head.end())
        if end < 0:
            raise Unfinished(f"no {closing}")
        found.append((head[1].strip(), text[head.end() : end]))
        at = end + len(closing)
    return found


def _without_end(text: str, closing: str) -> str:
    trimmed = text.rstrip()
    if not trimmed.endswith(closing):
        raise Unfinished(f"no {closing} at the end")
    return trimmed[: -len(closing)]
