"""DeepSeek-V3.2 and V4: tool calls in DSML, whose parameters say whether they are strings."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from miles_core.tito.arguments import Unfinished, bare, joined, shown_members
from miles_core.tito.family import Wrap
from miles_core.tito.formats import Call, CallFormat
from miles_core.tito.options import ThinkingSwitch
from miles_core.tito.parser import Thoughts
from miles_core.tito.thinking import ThinkingFamily
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Message, Tool, ToolCall
from miles_tito_deepseek import prompts, tokens

MARK = "｜DSML｜"
_INVOKE = re.compile(rf'\s*<{MARK}invoke name="([^"\n]+)">\n?')
_PARAMETER = re.compile(rf'\s*<{MARK}parameter name="([^"\n]+)" string="(true|false)">')


@dataclass(frozen=True, slots=True, kw_only=True)
class DsmlCalls:
    """A section of invokes."""

    section: str
    """Name of the section's element."""
    empty: str = ""
    """Written in an invoke without parameters."""

    @property
    def opening(self) -> str:
        return f"<{MARK}{self.section}>"

    @property
    def closing(self) -> str:
        return f"</{MARK}{self.section}>"

    def read(self, body: str, tools: Sequence[Tool]) -> Sequence[Call]:
        calls, at = [], 0
        while body[at:].strip():
            head = _INVOKE.match(body, at)
            if head is None:
                raise ValueError("text between calls")
            parts, at = self._parameters(body, head.end())
            calls.append(Call(name=head[1], arguments=joined(parts)))
        if not calls:
            raise ValueError("no call")
        return calls

    def _parameters(self, body: str, at: int) -> tuple[dict[str, str], int]:
        closing, invoke_end = f"</{MARK}parameter>", f"</{MARK}invoke>"
        parts: dict[str, str] = {}
        while (head := _PARAMETER.match(body, at)) is not None:
            end = body.find(closing, head.end())
            if end < 0:
                raise Unfinished("a parameter without its end")
            value = body[head.end() : end]
            if head[1] in parts:
                raise ValueError("a parameter twice")
            parts[head[1]] = json.dumps(value, ensure_ascii=False) if head[2] == "true" else _json(value)
            at = end + len(closing)
        rest = body[at:].lstrip()
        if not rest.startswith(invoke_end):
            raise ValueError("text between parameters") if rest else Unfinished("an invoke without its end")
        return parts, body.index(invoke_end, at) + len(invoke_end)

    def write(self, calls: Sequence[ToolCall], *, content: bool) -> str:
        return f"\n\n{self.opening}\n{''.join(map(self._invoke, calls))}{self.closing}"

    def _invoke(self, call: ToolCall) -> str:
        shown = shown_members(call.arguments).items()
        inner = "".join(
            f'<{MARK}parameter name="{key}" string="{"true" if value.startswith(chr(34)) else "false"}">'
            f"{bare(value, python=False)}</{MARK}parameter>\n"
            for key, value in shown
        )
        return f'<{MARK}invoke name="{call.name}">\n{inner or self.empty}</{MARK}invoke>\n'


class _Dsml(ThinkingFamily[ThinkingSwitch]):
    control_tokens = (tokens.BEGIN, tokens.END, tokens.USER_TOKEN, tokens.ASSISTANT_TOKEN)
    stops = (tokens.END,)
    end = tokens.END
    header = tokens.ASSISTANT_TOKEN
    user = Wrap(tokens.USER_TOKEN, "")
    thoughts: ClassVar[Thoughts] = Thoughts(pad="", after="")
    switch: ClassVar[str] = "thinking"
    tools_text: ClassVar[str]

    def __init__(self, options: ThinkingSwitch, tokenizer: ChatTokenizer) -> None:
        super().__init__(options, tokenizer)
        self._empty = tokens.empty_thought(tokenizer)

    @classmethod
    def for_checkpoint(cls, tokenizer: ChatTokenizer) -> Self:
        return cls(ThinkingSwitch(), tokenizer)

    def preamble(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[str, Sequence[Message]]:
        system, rest = (messages[0].content, messages[1:]) if messages[0].role == "system" else ("", messages)
        listed = "".join(json.dumps(tool.get("function", tool), ensure_ascii=False) + "\n" for tool in tools)
        described = self.tools_text.replace("{tools}", listed) if tools else ""
        return tokens.BEGIN + "\n\n".join(part for part in (system, described) if part), rest

    def prefill(self) -> str:
        return self.thoughts.opening if self.options.thinking else self._empty

    def thought(self, message: Message, *, forgotten: bool = False) -> str:
        if forgotten:
            return self.thoughts.closing
        if message.reasoning or self.options.thinking:
            return self.thoughts.write(message.reasoning or "")
        return self._empty


class DeepSeekV32Family(_Dsml):
    """Behind tool results the turn goes on with a new thought and without a header."""

    tool = Wrap("\n<result>", "</result>")
    tool_group = Wrap("\n\n<function_results>", "\n</function_results>")
    calls: ClassVar[CallFormat | None] = DsmlCalls(section="function_calls")
    tools_text: ClassVar[str] = prompts.V32_TOOLS
    deliberate: ClassVar[Mapping[str, str]] = {"two turns": "an earlier reply keeps the thought it was sampled with"}

    def header_after(self, previous: Message | None) -> str:
        return "\n\n" if previous is not None and previous.role == "tool" else self.header

    def opener(self, after: Message | None) -> str:
        return self.header_after(after) + self.prefill()


class DeepSeekV4Family(_Dsml):
    """Users and tool results that follow one another share one user turn."""

    calls: ClassVar[CallFormat | None] = DsmlCalls(section="tool_calls", empty="\n")
    tool = Wrap("<tool_result>", "</tool_result>")
    tools_text: ClassVar[str] = prompts.V4_TOOLS

    def template_variables(self) -> Mapping[str, object]:
        return {**super().template_variables(), "drop_thinking": self.earlier_reasoning() != "keep"}

    def turns(self, messages: Sequence[Message], *, before: Message | None, forgotten: int = 0) -> str:
        parts: list[str] = []
        previous = before
        for index, message in enumerate(messages):
            if message.role == "assistant":
                parts.append(self.assistant(message, previous, forgotten=index < forgotten))
            else:
                joins = previous is not None and previous.role in ("user", "tool")
                text = self.tool(message.content) if message.role == "tool" else message.content
                parts.append(("\n\n" if joins else tokens.USER_TOKEN) + text)
            previous = message
        return "".join(parts)


def _json(text: str) -> str:
    json.loads(text)
    return text.strip()
