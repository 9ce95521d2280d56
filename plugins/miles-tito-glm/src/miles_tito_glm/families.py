"""GLM-4.6 and GLM-4.7 (5.x writes as 4.7).

A GLM row closes no turn: the model stops by sampling ``<|user|>`` or ``<|observation|>``, which is also the opener of
the next message. It may stand there once, so `merge` drops the sampled one and the next message brings its own, which
need not be the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

from miles_core.tito.family import Wrap
from miles_core.tito.formats import CallFormat
from miles_core.tito.options import ThinkingSwitch
from miles_core.tito.parser import Thoughts
from miles_core.tito.thinking import Opens, ThinkingFamily
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Message, Tool
from miles_tito_glm import prompts
from miles_tito_glm.calls import ArgumentTags

START = "[gMASK]<sop>"


class _Glm(ThinkingFamily[ThinkingSwitch]):
    control_tokens = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
    stops = ("<|user|>", "<|observation|>", "<|endoftext|>")
    replaced_stops = stops
    end = ""
    header = "<|assistant|>"
    newline: ClassVar[str] = ""
    call_form: ClassVar[str]

    @classmethod
    def for_checkpoint(cls, tokenizer: ChatTokenizer) -> Self:
        return cls(ThinkingSwitch(), tokenizer)

    def preamble(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[str, Sequence[Message]]:
        if not tools:
            return START, messages
        listed = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools)
        return START + prompts.TOOLS.replace("{tools}", listed).replace("{call}", self.call_form), messages

    def template_variables(self) -> Mapping[str, object]:
        return {**super().template_variables(), "clear_thinking": self.earlier_reasoning() != "keep"}

    def said(self, message: Message, after: Message | None, *, forgotten: bool = False) -> str:
        content = message.content.strip()
        shown = self.newline + content if content else ""
        return self.thought(message, forgotten=forgotten) + shown + self.called(message)


class Glm46Family(_Glm):
    """The model opens its thought itself, on a line of its own; off, users end with /nothink."""

    opens: ClassVar[Opens] = "model"
    thoughts: ClassVar[Thoughts] = Thoughts(pad="", after="\n")
    no_thought: ClassVar[str] = "\n<think></think>"
    newline: ClassVar[str] = "\n"
    user = Wrap("<|user|>\n", "")
    system: ClassVar[Wrap | None] = Wrap("<|system|>\n", "")
    tool = Wrap("\n<tool_response>\n", "\n</tool_response>")
    tool_group = Wrap("<|observation|>", "")
    calls: ClassVar[CallFormat | None] = ArgumentTags(line="\n")
    call_form: ClassVar[str] = prompts.CALL_ON_LINES

    def thought(self, message: Message, *, forgotten: bool = False) -> str:
        """Without reasoning an empty thought, as the template writes for every turn."""
        return self.no_thought if forgotten else f"\n<think>{(message.reasoning or '').strip()}</think>"

    def lead(self) -> str:
        return "" if self.options.thinking else self.newline

    def spoken(self, message: Message) -> str:
        silent = message.role == "user" and not self.options.thinking and not message.content.endswith("/nothink")
        return super().spoken(message) + ("/nothink" if silent else "")


class Glm47Family(_Glm):
    """The opener holds the opening tag of the thought, or the closing one while thinking is off."""

    thoughts: ClassVar[Thoughts] = Thoughts(pad="", after="")
    no_thought: ClassVar[str] = "</think>"
    forgotten: ClassVar[str] = "</think>"
    user = Wrap("<|user|>", "")
    system: ClassVar[Wrap | None] = Wrap("<|system|>", "")
    tool = Wrap("<tool_response>", "</tool_response>")
    tool_group = Wrap("<|observation|>", "")
    calls: ClassVar[CallFormat | None] = ArgumentTags(line="")
    call_form: ClassVar[str] = prompts.CALL_ON_ONE_LINE
    deliberate: ClassVar[Mapping[str, str]] = {"two turns": "a reply without reasoning keeps the tag its opener wrote"}
