"""Discrete events: generation under processor sharing, plain timers, and pauses.

All generating requests advance at one common speed that falls with their number, so their progress is measured on one
shared odometer (tokens a request has been given); a request ends when the odometer reaches its mark. An event costs
O(log n), which lets a laptop follow thousands of devices.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

Action = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpeed:
    """Tokens per second of all engines together, ``peak * n / (n + half)`` at n requests: latency-bound while few,
    saturating while many."""

    peak: float
    half: float = 0.0
    """Requests at which half the peak is reached; 0 means always at the peak."""

    def per_request(self, running: int) -> float:
        return self.peak / (running + self.half)


@dataclass(slots=True)
class Clock:
    """Runs actions in order of their time."""

    speed: EngineSpeed
    now: float = 0.0
    generating: int = 0
    generating_s: float = 0.0
    """Integral of the number of generating requests over unpaused time."""
    busy_s: float = 0.0
    """Time in which at least one request was generating."""
    _paused: int = 0
    _odometer: float = 0.0
    _timers: list[tuple[float, int, Action]] = field(default_factory=list)
    _marks: list[tuple[float, int, Action]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)

    def after(self, seconds: float, action: Action) -> None:
        heapq.heappush(self._timers, (self.now + seconds, next(self._order), action))

    def generate(self, tokens: float, action: Action) -> None:
        """Call `action` once `tokens` are sampled."""
        heapq.heappush(self._marks, (self._odometer + tokens, next(self._order), action))
        self.generating += 1

    def pause(self) -> None:
        """Stop all generation; timers go on. Pauses nest."""
        self._paused += 1

    def resume(self) -> None:
        self._paused -= 1

    def step(self) -> bool:
        """Advance to the next event and run it; False when nothing is left."""
        rate = self.speed.per_request(self.generating) if self.generating and not self._paused else 0.0
        sampled = self.now + (self._marks[0][0] - self._odometer) / rate if rate else None
        timed = self._timers[0][0] if self._timers else None
        if sampled is None and timed is None:
            return False
        sampling_first = sampled is not None and (timed is None or sampled <= timed)
        at = sampled if sampling_first else timed
        assert at is not None
        self._advance(max(at, self.now), rate)
        if sampling_first:
            self._odometer, _, action = heapq.heappop(self._marks)
            self.generating -= 1
        else:
            _, _, action = heapq.heappop(self._timers)
        action()
        return True

    def _advance(self, to: float, rate: float) -> None:
        elapsed = to - self.now
        if rate:
            self._odometer += rate * elapsed
            self.generating_s += self.generating * elapsed
            self.busy_s += elapsed
        self.now = to
