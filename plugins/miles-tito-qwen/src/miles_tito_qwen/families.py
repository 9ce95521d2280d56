"""Qwen3, Qwen3-Thinking, Qwen3.5, Qwen3-Coder.

The seam of all: the template writes a newline behind ``<|im_end|>`` after every turn, and the model stops at
``<|im_end|>`` without sampling it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Generic, Self, TypeVar

from miles_core.tito.family import DeclaredFamily, Wrap
from miles_core.tito.formats import CallFormat, FunctionTags, JsonBlocks
from miles_core.tito.listing import function_element
from miles_core.tito.options import AlwaysThinks, FamilyOptions, ThinkingSwitch
from miles_core.tito.prompts import TAGGED_TOOLS
from miles_core.tito.thinking import Opens, ThinkingFamily
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Message, Tool
from miles_tito_qwen import prompts

Options = TypeVar("Options", bound=FamilyOptions)


class _Qwen(DeclaredFamily[Options], Generic[Options]):
    control_tokens = ("<|im_start|>", "<|im_end|>")
    stops = ("<|im_end|>", "<|endoftext|>")
    end = "<|im_end|>"
    seam = "\n"
    header = "<|im_start|>assistant\n"
    user = Wrap("<|im_start|>user\n", "<|im_end|>\n")
    system: ClassVar[Wrap | None] = Wrap("<|im_start|>system\n", "<|im_end|>\n")
    tool = Wrap("\n<tool_response>\n", "\n</tool_response>")
    tool_group = Wrap("<|im_start|>user", "<|im_end|>\n")


class _HermesQwen(_Qwen[Options], Generic[Options]):
    """Tools as JSON lines, the system message before them."""

    calls: ClassVar[CallFormat | None] = JsonBlocks()

    def preamble(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[str, Sequence[Message]]:
        system, rest = _split(messages)
        if tools:
            listed = "".join("\n" + _json(tool) for tool in tools)
            head = f"{system.content}\n\n" if system is not None else ""
            return _turn(head + prompts.HERMES_TOOLS.replace("{tools}", listed)), rest
        return ("" if system is None else _turn(system.content)), rest


class Qwen3Family(_HermesQwen[ThinkingSwitch], ThinkingFamily[ThinkingSwitch]):
    """The model opens its thought itself; with thinking off the opener holds an empty one."""

    opens: ClassVar[Opens] = "model"

    @classmethod
    def for_checkpoint(cls, tokenizer: ChatTokenizer) -> Self:
        return cls(ThinkingSwitch(), tokenizer)


class Qwen3ThinkingFamily(_HermesQwen[AlwaysThinks], ThinkingFamily[AlwaysThinks]):
    """Thinking cannot be switched off."""

    deliberate: ClassVar[Mapping[str, str]] = {"two turns": "a reply without reasoning keeps its empty thought"}

    @classmethod
    def for_checkpoint(cls, tokenizer: ChatTokenizer) -> Self:
        return cls(AlwaysThinks(), tokenizer)


class Qwen35Family(_Qwen[ThinkingSwitch], ThinkingFamily[ThinkingSwitch]):
    """Tools first, then the system message; user, tool and system texts are trimmed, as the template does."""

    system: ClassVar[Wrap | None] = None
    calls: ClassVar[CallFormat | None] = FunctionTags()
    deliberate: ClassVar[Mapping[str, str]] = {"two turns": "a reply without reasoning keeps its empty thought"}

    @classmethod
    def for_checkpoint(cls, tokenizer: ChatTokenizer) -> Self:
        return cls(ThinkingSwitch(), tokenizer)

    def preamble(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[str, Sequence[Message]]:
        system, rest = _split(messages)
        said = "" if system is None else system.content.strip()
        if tools:
            text = TAGGED_TOOLS.replace("{tools}", "".join("\n" + _json(tool) for tool in tools))
            return _turn(text + (f"\n\n{said}" if said else "")), rest
        return ("" if system is None else _turn(said)), rest

    def spoken(self, message: Message) -> str:
        return super().spoken(replace(message, content=message.content.strip()))

    def tool_result(self, message: Message, call: Message | None) -> str:
        return self.tool(message.content.strip())


class Qwen3CoderFamily(_Qwen[FamilyOptions]):
    """Tools as elements, no reasoning."""

    tool = Wrap("<tool_response>\n", "\n</tool_response>\n")
    tool_group = Wrap("<|im_start|>user\n", "<|im_end|>\n")
    calls: ClassVar[CallFormat | None] = FunctionTags()

    @classmethod
    def for_checkpoint(cls, tokenizer: ChatTokenizer) -> Self:
        return cls(FamilyOptions(), tokenizer)

    def preamble(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[str, Sequence[Message]]:
        system, rest = _split(messages)
        if not tools:
            return ("" if system is None else _turn(system.content)), rest
        listed = "".join("\n" + function_element(tool) for tool in tools)
        said = prompts.CODER_SYSTEM if system is None else system.content
        return _turn(said + prompts.CODER_TOOLS.replace("{tools}", listed)), rest


def _split(messages: Sequence[Message]) -> tuple[Message | None, Sequence[Message]]:
    return (messages[0], messages[1:]) if messages and messages[0].role == "system" else (None, messages)


def _turn(text: str) -> str:
    return f"<|im_start|>system\n{text}<|im_end|>\n"


def _json(tool: Tool) -> str:
    return json.dumps(tool, ensure_ascii=False)
