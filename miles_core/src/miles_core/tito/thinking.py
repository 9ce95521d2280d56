"""Families whose models reason before they answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Generic, Literal, TypeVar

from miles_core.tito.family import DeclaredFamily
from miles_core.tito.options import AlwaysThinks, EarlierReasoning, ThinkingSwitch
from miles_core.tito.parser import Thoughts
from miles_core.types import Message

T = TypeVar("T", bound=AlwaysThinks | ThinkingSwitch)
Opens = Literal["model", "opener"]


class ThinkingFamily(DeclaredFamily[T], Generic[T]):
    """A family with the options `thinking` and `earlier_reasoning`."""

    thoughts: ClassVar[Thoughts] = Thoughts()
    opens: ClassVar[Opens] = "opener"
    """Who writes the opening tag of a thought while thinking is on."""
    no_thought: ClassVar[str] = "<think>\n\n</think>\n\n"
    """What the opener holds while thinking is off."""
    forgotten: ClassVar[str] = ""
    """What the template leaves of a thought in an earlier turn."""
    switch: ClassVar[str] = "enable_thinking"
    """The template's variable for it."""

    def prefill(self) -> str:
        if not self.options.thinking:
            return self.no_thought
        return self.thoughts.opening + self.thoughts.pad if self.opens == "opener" else ""

    def thought(self, message: Message, *, forgotten: bool = False) -> str:
        if forgotten:
            return self.forgotten
        if message.reasoning:
            return self.thoughts.write(message.reasoning)
        if not self.options.thinking:
            return self.no_thought
        return self.thoughts.write("") if self.opens == "opener" else ""

    @property
    def reasons(self) -> bool:
        return self.options.thinking

    def earlier_reasoning(self) -> EarlierReasoning:
        return self.options.earlier_reasoning

    def template_variables(self) -> Mapping[str, object]:
        return {self.switch: self.options.thinking}
