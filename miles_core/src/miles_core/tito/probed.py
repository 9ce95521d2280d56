"""A declared family whose preamble the checkpoint's template writes: what `miles tito new` builds on.

Only the beginning of a conversation (system message, tools) goes through the template; every later token is written
from the family's data, so that rows grow by appending whatever the template would rewrite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from miles_core.tito.family import DeclaredFamily
from miles_core.tito.options import FamilyOptions
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Message, Tool

_MARK = "begin-of-the-first-user-message"


class ProbedFamily(DeclaredFamily[FamilyOptions]):
    """See `DeclaredFamily`; subclasses are written by `miles tito new`."""

    opened: str = ""
    """What the opener holds behind `header`: an opening tag of reasoning, or nothing."""
    unthought: str = ""
    """What stands for a thought where there is none; begins with `opened`."""

    @classmethod
    def for_checkpoint(cls, tokenizer: ChatTokenizer) -> Self:
        return cls(FamilyOptions(), tokenizer)

    def preamble(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[str, Sequence[Message]]:
        if tools and self.calls is None:
            raise self._refused("tools", "a conversation without them", "add the spelling of calls to the family")
        has_system = bool(messages) and messages[0].role == "system"
        shown = [*messages[: int(has_system)], Message(role="user", content=_MARK)]
        text = self.tokenizer.render(shown, tools, add_generation_prompt=False)
        head, found, _ = text.partition(self.user.before + _MARK)
        if not found:
            raise self._refused("the beginning of a conversation", f"{self.user.before!r} before its user", "")
        return head, messages[int(has_system) :]

    def prefill(self) -> str:
        return self.opened

    def thought(self, message: Message, *, forgotten: bool = False) -> str:
        if message.reasoning and self.thoughts is not None:
            return self.thoughts.write(message.reasoning)
        return self.unthought
