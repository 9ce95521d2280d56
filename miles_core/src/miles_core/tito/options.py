"""Options that token families share. A family without options of its own picks one of these classes as it is."""

from __future__ import annotations

from typing import Literal

from miles_core.options import Options

EarlierReasoning = Literal["keep", "branch"]


class FamilyOptions(Options):
    """Of every family built on `tito.family.DeclaredFamily`."""

    open_turn: Literal["refuse", "close"] = "refuse"
    """What to do when a conversation goes on after a turn that has no closing token, because it ended at a stop string:
    refuse the request, or close the turn, which writes the missing token as environment text and never trains it. A
    turn that was cut off by length can never be continued."""


class ReasoningOptions(FamilyOptions):
    """Of families whose models reason."""

    earlier_reasoning: EarlierReasoning = "keep"
    """What becomes of the reasoning of earlier turns where the published template would drop it: keep it in the row
    (one sequence, with everything that the model sampled), or start a branch that is rendered without it (needs
    `session.history: branching`)."""


class AlwaysThinks(ReasoningOptions):
    """Of models that cannot be told not to reason."""

    @property
    def thinking(self) -> bool:
        return True


class ThinkingSwitch(ReasoningOptions):
    """Of models that reason or not, as they are told."""

    thinking: bool = True
    """Whether the model reasons before it answers; if not, the opener of its turn holds an empty thought."""
