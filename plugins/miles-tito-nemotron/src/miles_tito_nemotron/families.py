"""NVIDIA Nemotron 3: ChatML with a thought in the opener and tagged tool calls.

The seam: the template writes a newline behind ``<|im_end|>``, which the model does not sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

from miles_core.tito.family import Wrap
from miles_core.tito.formats import CallFormat, FunctionTags
from miles_core.tito.listing import function_element
from miles_core.tito.options import ThinkingSwitch
from miles_core.tito.parser import Thoughts
from miles_core.tito.prompts import TAGGED_TOOLS
from miles_core.tito.thinking import ThinkingFamily
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Message, Tool


class Nemotron3Family(ThinkingFamily[ThinkingSwitch]):
    """A system turn always stands first, empty where there is none."""

    control_tokens = ("<|im_start|>", "<|im_end|>")
    stops = ("<|im_end|>",)
    end = "<|im_end|>"
    seam = "\n"
    header = "<|im_start|>assistant\n"
    user = Wrap("<|im_start|>user\n", "<|im_end|>\n")
    system: ClassVar[Wrap | None] = Wrap("<|im_start|>system\n", "<|im_end|>\n")
    tool = Wrap("<tool_response>\n", "\n</tool_response>\n")
    tool_group = Wrap("<|im_start|>user\n", "<|im_end|>\n")
    thoughts: ClassVar[Thoughts] = Thoughts(after="\n")
    no_thought: ClassVar[str] = "<think></think>"
    forgotten: ClassVar[str] = "<think></think>"
    calls: ClassVar[CallFormat | None] = FunctionTags(before="\n", after="\n")
    deliberate: ClassVar[Mapping[str, str]] = {"two turns": "a reply without reasoning keeps its empty thought"}

    @classmethod
    def for_checkpoint(cls, tokenizer: ChatTokenizer) -> Self:
        return cls(ThinkingSwitch(), tokenizer)

    def preamble(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[str, Sequence[Message]]:
        has_system = messages[0].role == "system"
        said = messages[0].content if has_system else ""
        if tools:
            listed = "".join("\n" + function_element(tool, enums=True, required_last=True) for tool in tools)
            said += ("\n\n" if said else "") + TAGGED_TOOLS.replace("{tools}", listed)
        return f"<|im_start|>system\n{said}<|im_end|>\n", messages[1:] if has_system else messages

    def thought(self, message: Message, *, forgotten: bool = False) -> str:
        """The template leaves the line break behind a forgotten thought where nothing is called."""
        if forgotten:
            return self.forgotten + ("\n" if message.reasoning and not message.tool_calls else "")
        return super().thought(message)

    def called(self, message: Message) -> str:
        """Behind an empty thought without line breaks, the first call stands on a line of its own."""
        assert self.calls is not None
        if not message.tool_calls:
            return ""
        silent = not self.options.thinking and not message.reasoning
        return self.calls.write(message.tool_calls, content=silent or bool(message.content))

    def template_variables(self) -> Mapping[str, object]:
        return {**super().template_variables(), "truncate_history_thinking": self.earlier_reasoning() != "keep"}
