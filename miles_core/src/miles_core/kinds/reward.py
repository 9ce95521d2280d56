"""Reward: scores a finished episode."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from miles_core.types import Message, Prompt

MAX_REWARD = 3.4e38
"""The largest score. Rewards become float32, and anything larger would not be finite there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What a reward gets to see. It is pickled, since rewards are called in another process."""

    prompt: Prompt
    messages: tuple[Message, ...]
    """The whole conversation, prompt included."""
    response: str
    """Text of the last assistant message."""
    truncated: bool
    """Whether the last assistant message was cut off by length."""
    metadata: Mapping[str, Any]
    """What the environment reported (`EpisodeResult.metadata`)."""


class Reward(Protocol):
    """``(scored, **options) -> float``, a plain or an async function.

    It returns a finite number, or a mapping to report parts too: ``{"reward": 0.5, "format": 1.0}``. If it raises, runs
    past its deadline or returns NaN, the trajectory counts as failed and is kept out of loss and baseline; it is never
    scored 0.
    """

    def __call__(
        self, scored: Scored, /, **options: Any
    ) -> float | Mapping[str, float] | Awaitable[float | Mapping[str, float]]: ...
