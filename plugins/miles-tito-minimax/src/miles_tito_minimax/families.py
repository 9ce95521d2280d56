"""MiniMax-M2 and its successors, which differ in the identity that the default system message states.

The seam: the template writes a newline behind ``[e~[``, which the model does not sample.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

from miles_core.errors import DataError
from miles_core.tito.family import Wrap
from miles_core.tito.formats import CallFormat, InvokeTags
from miles_core.tito.options import AlwaysThinks
from miles_core.tito.probes import USER
from miles_core.tito.thinking import ThinkingFamily
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Message, Tool
from miles_tito_minimax import prompts

START = "]~!b[]~b]system\n"
END = "[e~["


class MiniMaxM2Family(ThinkingFamily[AlwaysThinks]):
    """Every reply begins within a thought."""

    control_tokens = ("]~!b[", "]~b]", END)
    stops = (END,)
    end = END
    seam = "\n"
    header = "]~b]ai\n"
    user = Wrap("]~b]user\n", f"{END}\n")
    tool = Wrap("\n<response>", "</response>")
    tool_group = Wrap("]~b]tool", f"{END}\n")
    calls: ClassVar[CallFormat | None] = InvokeTags(opening="<minimax:tool_call>", closing="</minimax:tool_call>")
    deliberate: ClassVar[Mapping[str, str]] = {"two turns": "a reply without reasoning keeps its empty thought"}

    def __init__(self, options: AlwaysThinks, tokenizer: ChatTokenizer) -> None:
        super().__init__(options, tokenizer)
        self._identity = _identity(tokenizer)

    @classmethod
    def for_checkpoint(cls, tokenizer: ChatTokenizer) -> Self:
        return cls(AlwaysThinks(), tokenizer)

    def preamble(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[str, Sequence[Message]]:
        has_system = messages[0].role == "system"
        said = messages[0].content if has_system and messages[0].content else self._identity
        listed = "".join(
            f"<tool>{json.dumps(tool.get('function', tool), ensure_ascii=False)}</tool>\n" for tool in tools
        )
        described = prompts.TOOLS.replace("{tools}", listed) if tools else ""
        return f"{START}{said}{described}{END}\n", messages[1:] if has_system else messages

    def template_variables(self) -> Mapping[str, object]:
        return {}


def _identity(tokenizer: ChatTokenizer) -> str:
    """The system message the checkpoint's template writes when a conversation has none."""
    try:
        text = tokenizer.render([USER], add_generation_prompt=True)
    except DataError:
        return prompts.IDENTITY
    head, found, _ = text.partition(END)
    return head[len(START) :] if found and head.startswith(START) else prompts.IDENTITY
