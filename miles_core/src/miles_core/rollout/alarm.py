"""ConstantRewardAlarm: if every trajectory of several steps has the same reward, nothing is learnt.

Usual causes are a grader that never matches, an answer format that the model never keeps, and a task that it always
solves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class ConstantRewardAlarm:
    """Observes the rewards of each step, those of dropped groups included.

    Example:
        alarm = ConstantRewardAlarm(steps=5)
        text = alarm.observe(collected.rewards)     # None, or what to tell the user
    """

    def __init__(self, *, steps: int) -> None:
        self._steps = steps
        self._value: float | None = None
        self._streak = 0

    def observe(self, rewards: Sequence[float]) -> str | None:
        """Observe a step. Returns a warning after `steps` steps with one and the same reward, and every `steps` steps
        from then on."""
        if not self._steps or not rewards:
            return None
        value = rewards[0]
        if any(reward != value for reward in rewards):
            self._streak, self._value = 0, None
            return None
        self._streak = self._streak + 1 if value == self._value else 1
        self._value = value
        if self._streak % self._steps:
            return None
        return (
            f"the reward was {value:g} for every trajectory of the last {self._streak} steps, so nothing is learnt; "
            "look at some answers (miles inspect), at the reward function, and at how hard the prompts are"
        )

    def state(self) -> dict[str, Any]:
        """JSON-compatible."""
        return {"value": self._value, "streak": self._streak}

    def restore(self, state: dict[str, Any]) -> None:
        self._value = state["value"]
        self._streak = state["streak"]
