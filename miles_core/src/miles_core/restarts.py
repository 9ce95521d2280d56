"""How often something that fails is started again: so many times within a window, however long a run lasts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable


class RestartBudget:
    """Counts the restarts of one thing.

    A number for a whole life ends a long run after a few faults that have nothing to do with one another. No number at
    all lets a thing die of the same cause for ever.

    Args:
        allowed: Restarts within any `within_s` seconds.
        clock: Seconds; never goes back.

    Example:
        budget = RestartBudget(3, 3600.0)
        if budget.wait_s() == 0.0:
            budget.count()
    """

    def __init__(self, allowed: int, within_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._allowed, self._within_s, self._clock = allowed, within_s, clock
        self._at: deque[float] = deque(maxlen=max(allowed, 1))
        self.total = 0
        """Restarts so far."""

    def wait_s(self) -> float:
        """Seconds until another restart is allowed: 0.0 when it is now, infinity when none ever is."""
        if not self._allowed:
            return float("inf")
        if len(self._at) < self._allowed:
            return 0.0
        return max(0.0, self._at[0] + self._within_s - self._clock())

    def count(self) -> None:
        """A restart took place."""
        self._at.append(self._clock())
        self.total += 1

    def __str__(self) -> str:
        return f"at most {self._allowed} within {self._within_s:g} s"
