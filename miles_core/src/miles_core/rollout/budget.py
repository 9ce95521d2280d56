"""Budget: how much a producer keeps in flight, and when it may start another group. It holds settings only; the
producer counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much may be in flight, how it is refilled, and what happens to groups that are not trained."""

    groups_per_step: int
    group_size: int
    samples: int
    """How many trajectories may be in flight."""
    refill: Literal["sample", "group"] = "sample"
    unused: Literal["drop", "retry"] = "drop"
    max_weight_staleness: int | None = None
    update_interval: int = 1
    """The number of steps between two published versions."""

    def has_place(self, *, samples: float, groups: int) -> bool:
        """Whether another group fits besides the trajectories, or the groups, that are running."""
        if self.refill == "sample":
            return samples + self.group_size <= self.samples
        return groups < max(1, self.samples // self.group_size)

    def would_be_stale(self, ahead: int) -> bool:
        """Whether a group that starts now would be over the age limit by the time it is trained. Waiting costs less
        than discarding it.

        Args:
            ahead: How many groups will be trained before it or were trained since the last update: both make the new
                group older.
        """
        limit = self.max_weight_staleness
        return limit is not None and ahead // (self.groups_per_step * self.update_interval) > limit
