"""What trajectories cost: alternating generation and waiting, drawn from measured or assumed distributions."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

Draw = Callable[[random.Random], float]
"""One value of a distribution."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens sampled, then seconds waited for tools or the environment."""

    tokens: float
    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Independent draws for every trajectory; group mates share nothing but their submission."""

    turns: Draw
    """Turns of a trajectory; rounded, at least one."""
    tokens: Draw
    """Sampled tokens of one turn."""
    wait_s: Draw
    """Seconds between a turn and the next, or the end (tools, environment, reward)."""

    def draw(self, rng: random.Random) -> tuple[Turn, ...]:
        count = max(1, round(self.turns(rng)))
        return tuple(Turn(max(1.0, self.tokens(rng)), max(0.0, self.wait_s(rng))) for _ in range(count))


def constant(value: float) -> Draw:
    return lambda rng: value


def log_normal(median: float, *, spread: float) -> Draw:
    """A long tail: the 95th percentile is `spread` times the 5th.

    Raises:
        ValueError: `spread` below 1, a negative median, or either not finite.
    """
    if not (1 <= spread < math.inf and 0 <= median < math.inf):
        raise ValueError(f"log-normal with median {median} and spread {spread}: want median >= 0 and spread >= 1")
    if median == 0:
        return constant(0.0)
    sigma = math.log(spread) / (2 * NormalDist().inv_cdf(0.95))
    return lambda rng: rng.lognormvariate(math.log(median), sigma)


def measured(values: Sequence[float]) -> Draw:
    """The empirical distribution of what a run recorded.

    Raises:
        ValueError: no value.
    """
    kept = tuple(values)
    if not kept:
        raise ValueError("no measured value to draw from")
    return lambda rng: rng.choice(kept)
