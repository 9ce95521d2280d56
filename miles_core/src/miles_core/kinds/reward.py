"""Reward: score a finished episode."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from miles_core.types import Message, Prompt

MAX_REWARD = 3.4e38
"""Nothing beyond float32 is a score: its square, its sum and the trainer's copy of it would not be finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What a reward sees; picklable, since it is called in another process."""

    prompt: Prompt
    messages: tuple[Message, ...]
    """The whole conversation, prompt included."""
    response: str
    """Text of the last assistant message."""
    truncated: bool
    """The last completion ended by length."""
    metadata: Mapping[str, Any]
    """What the environment reported."""


class Reward(Protocol):
    """``(scored, **options) -> float``, plain or async.

    Must return a finite number within `MAX_REWARD`. An exception, a time-out or NaN makes the trajectory
    failed(reward): counted, kept out of loss and baseline, never scored 0. Return a mapping to report parts:
    ``{"reward": 0.5, "format": 1.0}``.
    """

    def __call__(
        self, scored: Scored, /, **options: Any
    ) -> float | Mapping[str, float] | Awaitable[float | Mapping[str, float]]: ...
