"""The exact mean over time of a level that changes in steps, such as the number of requests in flight."""

from __future__ import annotations

import time
from collections.abc import Callable


class Occupancy:
    """A level, and its mean over each stretch of time.

    Example:
        in_flight = Occupancy()
        in_flight.set(3)
        in_flight.mean()     # mean level since the last call of `mean`, or since the start
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._level = 0.0
        self._since = self._began = now()
        self._area = 0.0
        self.highest = 0.0

    @property
    def level(self) -> float:
        return self._level

    def set(self, level: float) -> None:
        now = self._now()
        self._area += self._level * (now - self._since)
        self._level, self._since = level, now
        self.highest = max(self.highest, level)

    def mean(self) -> float:
        """Mean since the last call, or the present level if no time has passed."""
        self.set(self._level)
        seconds = self._since - self._began
        area, self._area, self._began = self._area, 0.0, self._since
        return area / seconds if seconds > 0 else self._level
