"""Kimi's tool calls: a section of control tokens, each call with the id that the model gives it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from miles_core.tito.arguments import Unfinished, members
from miles_core.tito.formats import Call
from miles_core.types import Tool, ToolCall

_CALL = re.compile(r"\s*<\|tool_call_begin\|>(.*?)<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>", re.DOTALL)
_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionCalls:
    opening: str = "<|tool_calls_section_begin|>"
    closing: str = "<|tool_calls_section_end|>"

    def read(self, body: str, tools: Sequence[Tool]) -> Sequence[Call]:
        calls, at = [], 0
        while body[at:].strip():
            found = _CALL.match(body, at)
            if found is None:
                raise ValueError("text between calls")
            name = _ID.fullmatch(found[1].strip())
            if name is None:
                raise ValueError("a call without a name")
            arguments = found[2].strip() or "{}"
            try:
                members(arguments)
            except Unfinished as error:
                raise ValueError("arguments without their end") from error
            calls.append(Call(name=name[1], arguments=arguments, id=found[1].strip()))
            at = found.end()
        if not calls:
            raise ValueError("no call")
        return calls

    def write(self, calls: Sequence[ToolCall], *, content: bool) -> str:
        written = "".join(
            f"<|tool_call_begin|>{call.id}<|tool_call_argument_begin|>{call.arguments or '{}'}<|tool_call_end|>"
            for call in calls
        )
        return self.opening + written + self.closing
