"""DeepSeek-V3.1: tool calls between control tokens, an assistant turn that goes on behind tool results."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from miles_core.tito.arguments import Unfinished, members
from miles_core.tito.family import Wrap
from miles_core.tito.formats import Call, CallFormat
from miles_core.tito.parser import Thoughts
from miles_core.tito.thinking import ThinkingFamily
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Message, Tool, ToolCall
from miles_tito_deepseek import prompts, tokens
from miles_tito_deepseek.options import DeepSeekOptions

_CALL = re.compile(rf"\s*{tokens.CALL_BEGIN}(.*?){tokens.CALL_SEPARATOR}(.*?){tokens.CALL_END}", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCalls:
    """A section of ``begin NAME separator ARGUMENTS end``, all control tokens."""

    opening: str = tokens.CALLS_BEGIN
    closing: str = tokens.CALLS_END

    def read(self, body: str, tools: Sequence[Tool]) -> Sequence[Call]:
        calls, at = [], 0
        while body[at:].strip():
            found = _CALL.match(body, at)
            if found is None:
                raise ValueError("text between calls")
            name, arguments = found[1].strip(), found[2].strip() or "{}"
            try:
                members(arguments)
            except Unfinished as error:
                raise ValueError("arguments without their end") from error
            if not name:
                raise ValueError("a call without a name")
            calls.append(Call(name=name, arguments=arguments))
            at = found.end()
        if not calls:
            raise ValueError("no call")
        return calls

    def write(self, calls: Sequence[ToolCall], *, content: bool) -> str:
        written = "".join(
            f"{tokens.CALL_BEGIN}{call.name}{tokens.CALL_SEPARATOR}{call.arguments or '{}'}{tokens.CALL_END}"
            for call in calls
        )
        return self.opening + written + self.closing


class DeepSeekV31Family(ThinkingFamily[DeepSeekOptions]):
    """Thinking and tools exclude one another, as the model card says."""

    control_tokens = (
        tokens.BEGIN,
        tokens.END,
        tokens.USER_TOKEN,
        tokens.ASSISTANT_TOKEN,
        tokens.CALLS_BEGIN,
        tokens.CALLS_END,
        tokens.CALL_BEGIN,
        tokens.CALL_END,
        tokens.CALL_SEPARATOR,
        tokens.OUTPUT_BEGIN,
        tokens.OUTPUT_END,
    )
    stops = (tokens.END,)
    end = tokens.END
    header = tokens.ASSISTANT_TOKEN
    user = Wrap(tokens.USER_TOKEN, "")
    tool = Wrap(tokens.OUTPUT_BEGIN, tokens.OUTPUT_END)
    thoughts: ClassVar[Thoughts] = Thoughts(pad="", after="")
    switch: ClassVar[str] = "thinking"
    calls: ClassVar[CallFormat | None] = TokenCalls()
    deliberate: ClassVar[Mapping[str, str]] = {
        "tools": "the template leaves tools out; they are written as the model card says",
        "tools without system": "the template leaves tools out; they are written as the model card says",
        "tool loop": "the template leaves tools out, and reasoning before a call",
        "silent call": "the template leaves tools out, and reasoning before a call",
        "parallel calls": "the template leaves tools out, and reasoning before a call",
    }

    def __init__(self, options: DeepSeekOptions, tokenizer: ChatTokenizer) -> None:
        super().__init__(options, tokenizer)
        self._empty = tokens.empty_thought(tokenizer)

    @classmethod
    def for_checkpoint(cls, tokenizer: ChatTokenizer) -> Self:
        return cls(DeepSeekOptions(), tokenizer)

    def preamble(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[str, Sequence[Message]]:
        if tools and self.options.thinking:
            raise self._refused("tools while thinking is on", "thinking: false", "switch thinking off")
        system, rest = (messages[0].content, messages[1:]) if messages[0].role == "system" else ("", messages)
        return tokens.BEGIN + "\n\n".join(part for part in (system, _described(tools)) if part), rest

    @property
    def appendable(self) -> frozenset[str]:
        """No tool results while thinking is on."""
        return super().appendable - ({"tool"} if self.options.thinking else set())

    def prefill(self) -> str:
        return self.thoughts.opening if self.options.thinking else self._empty

    def thought(self, message: Message, *, forgotten: bool = False) -> str:
        if forgotten:
            return self._empty
        if message.reasoning or self.options.thinking:
            return self.thoughts.write(message.reasoning or "")
        return self._empty

    def opener(self, after: Message | None) -> str:
        return "" if after is not None and after.role == "tool" else super().opener(after)

    def header_after(self, previous: Message | None) -> str:
        return "" if previous is not None and previous.role == "tool" else self.header

    def said(self, message: Message, after: Message | None, *, forgotten: bool = False) -> str:
        """Behind tool results the turn goes on: no header, and no thought of its own."""
        if after is not None and after.role == "tool":
            return message.content + self.called(message)
        return super().said(message, after, forgotten=forgotten)


def _described(tools: Sequence[Tool]) -> str:
    if not tools:
        return ""
    functions = [tool.get("function", tool) for tool in tools]
    listed = "".join(
        f"\n### {function['name']}\nDescription: {function.get('description', '')}\n\n"
        f"Parameters: {json.dumps(function.get('parameters', {}), ensure_ascii=False)}\n"
        for function in functions
    )
    return prompts.V31_TOOLS.replace("{tools}", listed)
