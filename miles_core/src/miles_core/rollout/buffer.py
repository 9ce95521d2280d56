"""`BoundedBuffer`, the data buffer of this release: first in, first out, as large as two batches by default.

A bounded queue gives backpressure and no freshness: the limit on age is a dial of its own. Failures and filters are
judged on the way in, since those verdicts are fixed; age on the way out, since it grows while a group waits.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Mapping

from miles_core.errors import ConfigError
from miles_core.kinds.data_buffer import BufferContext, FinishedGroup
from miles_core.options import BoundedBufferOptions

STALE = "stale"
"""Reason of a group that is too old when it would be taken."""


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
