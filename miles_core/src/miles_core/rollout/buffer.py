"""The data buffer `bounded`: first in, first out, with room for two batches by default.

A full buffer holds the rollout back, but does not make data fresh; the limit on age does. Failures and filters are
judged when a group is put in, since that verdict never changes. Age is judged when it is taken, since it grows.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from miles_core.errors import ConfigError, MilesError, PluginError
from miles_core.kinds.data_buffer import BufferContext, DataBuffer, FinishedGroup
from miles_core.options import BoundedBufferOptions
from miles_core.user_function import in_words

STALE = "stale"
"""The reason for rejecting a group that is too old when it would be taken."""


class BoundedBuffer:
    """See `kinds.data_buffer.DataBuffer`."""

    def __init__(self, options: BoundedBufferOptions, context: BufferContext) -> None:
        self._context = context
        self.capacity = math.floor(options.capacity_factor * context.groups_per_step + 1e-9)
        if self.capacity < 1:
            raise ConfigError(
                "the data buffer would hold no group",
                expected="capacity_factor x groups_per_step of at least 1",
                found=f"{options.capacity_factor:g} x {context.groups_per_step}",
                where="schedule.buffer",
                do="raise schedule.buffer.capacity_factor",
            )
        self._groups: deque[FinishedGroup] = deque()
        self._changed = asyncio.Condition()

    async def put(self, finished: FinishedGroup) -> None:
        reason = self._context.judge(finished.group)
        if reason is not None:
            self._context.reject(finished, reason)
            return
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._groups) < self.capacity)
            self._groups.append(finished)
            self._changed.notify_all()

    async def get(self) -> FinishedGroup:
        limit = self._context.max_weight_staleness
        async with self._changed:
            while True:
                await self._changed.wait_for(lambda: bool(self._groups))
                found = self._groups.popleft()
                self._changed.notify_all()
                age = None if limit is None else self._context.age(found.group)
                if age is None or limit is None or age <= limit:
                    return found
                self._context.reject(found, STALE)

    def metrics(self) -> Mapping[str, float]:
        return {"size": float(len(self._groups)), "capacity": float(self.capacity)}


class GuardedBuffer:
    """Wraps a data buffer, which may be a plugin's code, so that errors name it. Whether every group that goes in comes
    out exactly once is checked by the ledger.

    Raises:
        PluginError: from every call, if the buffer raises, or returns what its protocol does not allow.
    """

    def __init__(self, buffer: DataBuffer) -> None:
        self._buffer = buffer
        self._name = f"data buffer {type(buffer).__name__}"

    async def put(self, finished: FinishedGroup) -> None:
        with self._named("put"):
            await self._buffer.put(finished)

    async def get(self) -> FinishedGroup:
        with self._named("get"):
            found = await self._buffer.get()
        if not isinstance(found, FinishedGroup):
            raise PluginError(f"{self._name} gave out no group", expected="a FinishedGroup", found=f"{found!r:.200}")
        return found

    def metrics(self) -> Mapping[str, float]:
        with self._named("metrics"):
            figures = dict(self._buffer.metrics())
        size, capacity = (figures.get(key, math.nan) for key in ("size", "capacity"))
        if not (0 <= size < math.inf and capacity > 0):
            raise PluginError(
                f"{self._name} does not say how full it is",
                expected="size and capacity, numbers of groups",
                found=f"{figures!r:.200}",
            )
        return figures

    @contextmanager
    def _named(self, call: str) -> Iterator[None]:
        try:
            yield
        except MilesError:
            raise
        except Exception as error:
            raise PluginError(f"{self._name}: {call} raised {in_words(error)}") from error
