"""Budget: how much a producer keeps in flight, and when it may start another group. Pure; the producer counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much is in flight, how it is refilled, and what becomes of groups that are not trained."""

    groups_per_step: int
    group_size: int
    samples: int
    """Trajectories in flight."""
    refill: Literal["sample", "group"] = "sample"
    unused: Literal["drop", "retry"] = "drop"
    max_weight_staleness: int | None = None
    update_interval: int = 1
    """Steps for each published version."""

    def has_place(self, *, samples: float, groups: int) -> bool:
        """Whether another group fits beside those trajectories, or those groups, that are running."""
        if self.refill == "sample":
            return samples + self.group_size <= self.samples
        return groups < max(1, self.samples // self.group_size)

    def would_be_stale(self, ahead: int) -> bool:
        """Whether a group that starts now would be over the limit by the time it is trained: to wait costs less than to
        discard.

        Args:
            ahead: Groups that are pending, and those trained since the last update: what is not published yet makes the
                new one older just the same.
        """
        limit = self.max_weight_staleness
        return limit is not None and ahead // (self.groups_per_step * self.update_interval) > limit
