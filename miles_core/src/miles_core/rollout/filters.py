"""The filters of the core. Each keeps a finished group (returns None), or drops it for a reason that is counted."""

from __future__ import annotations

import math

from miles_core.types import Group, Status


def nonzero_std(group: Group, /, *, min_std: float = 0.0) -> str | None:
    """Drop groups whose rewards carry no signal: dynamic sampling, DAPO (arXiv 2503.14476).

    Only trainable trajectories count: a failure has no reward, and one lone survivor has nothing to be compared with.
    """
    rewards = [trajectory.reward for trajectory in group.trainable if trajectory.reward is not None]
    if len(set(rewards)) <= 1:  # exact equality first: a mean of equal floats can be off by one rounding
        return "zero_std"
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return None if std > min_std else "zero_std"


def no_failures(group: Group, /) -> str | None:
    """Drop groups in which any trajectory failed or was aborted, so that every group has its full size."""
    bad = (Status.FAILED, Status.ABORTED)
    return "has_failures" if any(trajectory.status in bad for trajectory in group.trajectories) else None
