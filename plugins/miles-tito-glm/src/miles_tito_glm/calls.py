"""GLM's tool calls: the name, then one pair of tags for each argument's key and value."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from miles_core.tito.arguments import Unfinished, bare, joined, properties, shown_members, typed
from miles_core.tito.formats import Call
from miles_core.types import Tool, ToolCall

_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentTags:
    """``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>``."""

    line: str
    """What stands before every part: a newline (4.6) or nothing (4.7)."""
    opening: str = "<tool_call>"
    closing: str = "</tool_call>"

    def read(self, body: str, tools: Sequence[Tool]) -> Sequence[Call]:
        name, tag, _ = body.partition("<arg_key>")
        at = len(name)
        name = name.strip()
        if not name or any(char in name for char in "<>\n"):
            raise ValueError("no name")
        schema, parts = properties(tools, name), dict[str, str]()
        while tag and body[at:].strip():
            pair = _PAIR.match(body, at)
            if pair is None:
                if body[at:].lstrip().startswith("<arg_key>"):
                    raise Unfinished("an argument without its end")
                raise ValueError("text between arguments")
            key = pair[1].strip()
            if key in parts:
                raise ValueError("an argument twice")
            parts[key] = typed(pair[2], schema.get(key))
            at = pair.end()
        return [Call(name=name, arguments=joined(parts))]

    def write(self, calls: Sequence[ToolCall], *, content: bool) -> str:
        line = self.line
        return "".join(f"{line}{self.opening}{call.name}{line}{self._arguments(call)}{self.closing}" for call in calls)

    def _arguments(self, call: ToolCall) -> str:
        line = self.line
        return "".join(
            f"<arg_key>{key}</arg_key>{line}<arg_value>{bare(value, python=False)}</arg_value>{line}"
            for key, value in shown_members(call.arguments).items()
        )
