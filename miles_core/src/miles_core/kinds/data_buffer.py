"""Data buffer: holds finished groups between a rollout that never stops and a trainer that takes batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from miles_core.types import Group


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FinishedGroup:
    """A group whose trajectories are all generated and scored."""

    number: int
    """Unique in the run; a group that was started later has a higher one."""
    group: Group


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferContext:
    """What the driver tells a buffer at creation."""

    groups_per_step: int
    """Groups of one batch."""
    max_weight_staleness: int | None
    """How old a group may be when it is taken, in published versions; None is no limit."""
    judge: Callable[[Group], str | None]
    """Tells why a group cannot be trained (it failed, or a filter drops it), or None. The answer never changes."""
    age: Callable[[Group], int | None]
    """Tells how many published versions the group's oldest token is behind now; None when no token has a version."""
    reject: Callable[[FinishedGroup, str], None]
    """To be called with a group that will not be trained, and the reason: the answer of `judge`, or ``stale``."""


class DataBuffer(Protocol):
    """Created in the driver as ``DataBuffer(options, context)``. All calls come from one event loop.

    Every group that is put in must come out exactly once: through `get`, or through `context.reject`.
    """

    async def put(self, finished: FinishedGroup) -> None:
        """Take a group in, or reject it if `context.judge` finds a reason. Waits while the buffer is full, except with
        a group that is rejected.

        Waiting here is what holds the rollout back: no new group starts meanwhile. If the call is cancelled, the group
        is not in the buffer.
        """
        ...

    async def get(self) -> FinishedGroup:
        """Hand out the next group to train, and reject groups that are too old by now. Waits for one. If the call is
        cancelled, no group has left the buffer."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """At least ``size``, the number of groups held, and ``capacity``."""
        ...
