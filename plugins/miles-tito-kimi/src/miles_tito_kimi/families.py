"""Kimi-K2, Kimi-K2-Thinking, Kimi-K2.5.

A Kimi model numbers its calls over the whole conversation and writes the id itself: ``functions.NAME:NUMBER``. The id
a tool result names must be the one the model wrote, so ids of that form travel unchanged; others are numbered here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Generic, Self, TypeVar

from miles_core.tito.family import DeclaredFamily
from miles_core.tito.formats import CallFormat
from miles_core.tito.options import AlwaysThinks, FamilyOptions, ThinkingSwitch
from miles_core.tito.parser import Thoughts
from miles_core.tito.thinking import Opens, ThinkingFamily
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Message, Tool
from miles_tito_kimi.calls import SectionCalls

Options = TypeVar("Options", bound=FamilyOptions)
_OWN_ID = re.compile(r"functions\.[^:]+:\d+")
SANDBOX = "the template changes a list while it renders calls, which the sandbox of chat templates refuses"
DEFAULT_SYSTEM = "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>"


class _Kimi(DeclaredFamily[Options], Generic[Options]):
    control_tokens = ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>")
    stops = ("<|im_end|>", "[EOS]")
    end = "<|im_end|>"
    header = "<|im_assistant|>assistant<|im_middle|>"
    calls: ClassVar[CallFormat | None] = SectionCalls()
    default_system: ClassVar[str] = DEFAULT_SYSTEM
    deliberate: ClassVar[Mapping[str, str]] = dict.fromkeys(("tool loop", "silent call", "parallel calls"), SANDBOX)
    separators: ClassVar[tuple[str, str]] = (", ", ": ")

    def preamble(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[str, Sequence[Message]]:
        listed = json.dumps(list(tools), ensure_ascii=False, separators=self.separators)
        declared = f"<|im_system|>tool_declare<|im_middle|>{listed}<|im_end|>" if tools else ""
        return declared + ("" if messages[0].role == "system" else self.default_system), messages

    @property
    def appendable(self) -> frozenset[str]:
        return frozenset({"system", "user", "assistant", "tool"})

    def spoken(self, message: Message) -> str:
        opening = "<|im_user|>" if message.role == "user" else "<|im_system|>"
        return f"{opening}{message.name or message.role}<|im_middle|>{message.content}<|im_end|>"

    def tool_result(self, message: Message, call: Message | None) -> str:
        returned = f"## Return of {message.tool_call_id}\n{message.content}"
        return f"<|im_system|>{message.name or message.role}<|im_middle|>{returned}<|im_end|>"

    def turns(self, messages: Sequence[Message], *, before: Message | None, forgotten: int = 0) -> str:
        known = [] if before is None else [before]
        numbered = _numbered([*known, *messages])
        return super().turns(numbered[len(known) :], before=numbered[0] if known else None, forgotten=forgotten)


class KimiK2Family(_Kimi[FamilyOptions]):
    """No reasoning."""

    default_system: ClassVar[str] = DEFAULT_SYSTEM + "\n"

    @classmethod
    def for_checkpoint(cls, tokenizer: ChatTokenizer) -> Self:
        return cls(FamilyOptions(), tokenizer)


class KimiK2ThinkingFamily(_Kimi[AlwaysThinks], ThinkingFamily[AlwaysThinks]):
    """The model writes the whole thought; a reply without one holds the empty tags."""

    opens: ClassVar[Opens] = "model"
    thoughts: ClassVar[Thoughts] = Thoughts(pad="", after="")

    @classmethod
    def for_checkpoint(cls, tokenizer: ChatTokenizer) -> Self:
        return cls(AlwaysThinks(), tokenizer)

    def thought(self, message: Message, *, forgotten: bool = False) -> str:
        return self.thoughts.write("" if forgotten else message.reasoning or "")

    def forgets_before(self, messages: Sequence[Message]) -> int:
        return _after_last_answer(messages)

    def template_variables(self) -> Mapping[str, object]:
        return {}


class KimiK25Family(_Kimi[ThinkingSwitch], ThinkingFamily[ThinkingSwitch]):
    """The opener opens the thought, or closes an empty one."""

    thoughts: ClassVar[Thoughts] = Thoughts(pad="", after="")
    no_thought: ClassVar[str] = "<think></think>"
    forgotten: ClassVar[str] = "<think></think>"
    switch: ClassVar[str] = "thinking"
    default_system: ClassVar[str] = ""
    separators: ClassVar[tuple[str, str]] = (",", ":")

    @classmethod
    def for_checkpoint(cls, tokenizer: ChatTokenizer) -> Self:
        return cls(ThinkingSwitch(), tokenizer)

    def forgets_before(self, messages: Sequence[Message]) -> int:
        return _after_last_answer(messages)

    def template_variables(self) -> Mapping[str, object]:
        return {**super().template_variables(), "preserve_thinking": self.earlier_reasoning() == "keep"}


def _after_last_answer(messages: Sequence[Message]) -> int:
    answers = (i for i, message in enumerate(messages) if message.role == "assistant" and not message.tool_calls)
    return max((index + 1 for index in answers), default=0)


def _numbered(messages: Sequence[Message]) -> list[Message]:
    """The messages with every call id in the model's form, and tool results that name it."""
    found: list[Message] = []
    names: dict[str, str] = {}
    waiting: list[str] = []
    count = 0
    for message in messages:
        if message.tool_calls:
            calls = []
            for call in message.tool_calls:
                own = _OWN_ID.match(call.id)
                names[call.id] = own[0] if own else f"functions.{call.name}:{count}"
                calls.append(replace(call, id=names[call.id]))
                count += 1
            waiting = [call.id for call in calls]
            message = replace(message, tool_calls=tuple(calls))
        elif message.role == "tool":
            named = names.get(message.tool_call_id or "")
            given = _OWN_ID.match(message.tool_call_id or "")
            if named is None:
                named = given[0] if given else next(iter(waiting), f"functions.{message.name or 'unknown'}:{count}")
            waiting = [each for each in waiting if each != named]
            message = replace(message, tool_call_id=named)
        found.append(message)
    return found
