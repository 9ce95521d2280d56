"""Data buffer: holds finished groups between a rollout that never stops and a trainer that takes batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from miles_core.types import Group


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FinishedGroup:
    """A whole group whose generation and rewards are final."""

    number: int
    """Of the group, unique in the run; a later one was started later."""
    group: Group


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferContext:
    """What the driver tells a buffer at creation."""

    groups_per_step: int
    """Groups of one batch."""
    max_weight_staleness: int | None
    """Published versions a group may be behind when it is taken; None is no limit."""
    judge: Callable[[Group], str | None]
    """Why a finished group cannot be trained (it failed, or a filter says so), or None. The verdict never changes."""
    age: Callable[[Group], int | None]
    """Published versions the group's oldest token is behind now, or None when no token has a version."""
    reject: Callable[[FinishedGroup, str], None]
    """Takes a group that will not be trained. The reason is what `judge` said, or ``stale``."""


class DataBuffer(Protocol):
    """Created in the driver as ``DataBuffer(options, context)``. All calls come from one event loop.

    Every group put in is either handed out by `get` once or given to `context.reject` once.
    """

    async def put(self, finished: FinishedGroup) -> None:
        """Judge a group, then keep it; wait while the buffer is full. A rejected group never waits.

        Waiting is the backpressure: while a put waits, nothing new is started. Cancelling it leaves the group out.
        """
        ...

    async def get(self) -> FinishedGroup:
        """The next group to train, judged for its age now; wait for one. Cancelling it takes nothing out."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Gauges: ``size`` (groups held) and ``capacity``."""
        ...
