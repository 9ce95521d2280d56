"""Options of the families of this distribution."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class ThinkingOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    thinking: bool = True
    """Whether the model reasons before it answers; off, the opener holds an empty thought."""
    earlier_reasoning: Literal["keep", "branch"] = "keep"
    """What becomes of reasoning that the published template drops once a user speaks again: keep it in the row (one
    sequence, what the model sampled stays), or start a branch that is rendered without it (branching histories
    only)."""
    open_turn: Literal["refuse", "close"] = "refuse"
    """What going on after a turn without its closing token does (it ended at a stop string): refuse it, or write the
    missing token as environment text, which is never trained. Turns cut off by length can never be extended."""


class ThinkingOnlyOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    earlier_reasoning: Literal["keep", "branch"] = "keep"
    """What becomes of reasoning that the published template drops once a user speaks again: keep it in the row (one
    sequence, what the model sampled stays), or start a branch that is rendered without it (branching histories
    only)."""
    open_turn: Literal["refuse", "close"] = "refuse"
    """What going on after a turn without its closing token does (it ended at a stop string): refuse it, or write the
    missing token as environment text, which is never trained. Turns cut off by length can never be extended."""

    @property
    def thinking(self) -> bool:
        """Always: the model has no switch."""
        return True


class CoderOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    open_turn: Literal["refuse", "close"] = "refuse"
    """What going on after a turn without its closing token does (it ended at a stop string): refuse it, or write the
    missing token as environment text, which is never trained. Turns cut off by length can never be extended."""
