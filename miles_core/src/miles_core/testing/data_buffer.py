"""Conformance kit for data buffers: every group that is put in comes out exactly once, or is rejected exactly once.

    class TestMine(DataBufferConformance):
        capacity = 4
        def make(self, context): return MyBuffer(MyOptions(), context)

In the kit, a group whose reward is 0 cannot be trained, and a group is as old as the version of its first span.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable
from typing import Any, ClassVar, TypeVar

import numpy as np

from miles_core.contracts.versions import group_staleness
from miles_core.kinds.data_buffer import BufferContext, DataBuffer, FinishedGroup
from miles_core.types import Group, Message, Prompt, Status, TokenSpan, Trajectory

T = TypeVar("T")


def finished_group(number: int, *, version: int = 0, reward: float = 1.0, size: int = 1) -> FinishedGroup:
    """A group of `size` trajectories of three tokens, the last two sampled by `version`; -1 is no version."""
    sampled = np.array([False, True, True])
    rows = tuple(
        Trajectory(
            prompt_id=f"p{number}",
            session_id=f"s{number}-{index}",
            token_ids=np.arange(3, dtype=np.int32),
            sampled=sampled,
            loss_mask=sampled,
            logprobs=np.array([np.nan, -0.5, -0.5], dtype=np.float32),
            spans=(TokenSpan(start=1, end=3, weight_version=version),),
            temperature=1.0,
            status=Status.COMPLETED,
            reward=reward,
        )
        for index in range(size)
    )
    prompt = Prompt(id=f"p{number}", messages=(Message(role="user", content="?"),))
    return FinishedGroup(number=number, group=Group(prompt=prompt, trajectories=rows))


class Bench:
    """A buffer with its context, and what it rejected."""

    def __init__(self, kit: DataBufferConformance, limit: int | None = None) -> None:
        self.version = 0
        self.rejected: list[tuple[int, str]] = []
        self.buffer = kit.make(
            BufferContext(
                groups_per_step=kit.groups_per_step,
                max_weight_staleness=limit,
                judge=lambda group: "worthless" if group.trajectories[0].reward == 0 else None,
                age=self._age,
                reject=lambda finished, reason: self.rejected.append((finished.number, reason)),
            )
        )

    def _age(self, group: Group) -> int | None:
        found = group_staleness(group, self.version)
        return None if found is None else found.s_old

    async def put(self, *numbers: int, **facts: Any) -> None:
        for number in numbers:
            await self.buffer.put(finished_group(number, **facts))


class DataBufferConformance:
    """Subclass it and say how to make the buffer."""

    groups_per_step: ClassVar[int] = 2
    capacity: ClassVar[int]
    """Groups it holds when the context asks for batches of `groups_per_step`."""
    deadline_s: ClassVar[float] = 60.0

    def make(self, context: BufferContext) -> DataBuffer:
        raise NotImplementedError

    async def _soon(self, what: Awaitable[T], otherwise: str) -> T:
        try:
            return await asyncio.wait_for(what, self.deadline_s)
        except TimeoutError:
            raise AssertionError(otherwise) from None

    async def test_what_goes_in_comes_out_once_and_the_gauges_count_it(self) -> None:
        bench = Bench(self)
        await self._soon(bench.put(*range(self.capacity)), "a buffer that is not full makes a put wait")
        assert bench.buffer.metrics() == {"size": self.capacity, "capacity": self.capacity}
        found = [(await self._soon(bench.buffer.get(), "a held group is not handed out")).number for _ in range(2)]
        assert bench.buffer.metrics()["size"] == self.capacity - 2
        found += [
            (await self._soon(bench.buffer.get(), "a held group is not handed out")).number
            for _ in range(self.capacity - 2)
        ]
        assert sorted(found) == list(range(self.capacity)), f"groups {found} came out"
        assert bench.rejected == []

    async def test_a_full_buffer_makes_puts_wait_and_a_get_lets_one_in(self) -> None:
        bench = Bench(self)
        await bench.put(*range(self.capacity))
        late = asyncio.create_task(bench.put(self.capacity))
        await asyncio.sleep(0.02)
        assert not late.done(), "a full buffer took another group"
        assert bench.buffer.metrics()["size"] == self.capacity
        await bench.buffer.get()
        await self._soon(late, "a get made room, and the put still waits")

    async def test_a_rejected_group_never_waits_and_is_given_its_reason(self) -> None:
        bench = Bench(self)
        await bench.put(*range(self.capacity))
        await self._soon(bench.put(99, reward=0.0), "a group that cannot be trained waits for room")
        assert bench.rejected == [(99, "worthless")], f"rejected: {bench.rejected}"
        assert bench.buffer.metrics()["size"] == self.capacity

    async def test_a_get_waits_for_a_group(self) -> None:
        bench = Bench(self)
        getting = asyncio.create_task(bench.buffer.get())
        await asyncio.sleep(0.02)
        assert not getting.done(), "an empty buffer handed something out"
        await bench.put(7)
        assert (await self._soon(getting, "a put did not wake the get")).number == 7

    async def test_age_is_judged_when_a_group_is_taken_and_the_limit_itself_is_young_enough(self) -> None:
        bench = Bench(self, limit=1)
        await bench.put(0, version=0)
        await bench.put(1, version=1)
        bench.version = 2
        found = await self._soon(bench.buffer.get(), "a group at the limit was not handed out")
        assert found.number == 1, f"group {found.number} came out; one is 2 versions old, the other at the limit of 1"
        getting = asyncio.create_task(bench.buffer.get())
        await asyncio.sleep(0.02)
        assert not getting.done(), "a stale group was handed out"
        getting.cancel()
        assert bench.rejected == [(0, "stale")], f"rejected: {bench.rejected}"
        assert bench.buffer.metrics()["size"] == 0

    async def test_a_group_without_a_version_is_never_stale(self) -> None:
        bench = Bench(self, limit=0)
        bench.version = 9
        await bench.put(0, version=-1)
        assert (await self._soon(bench.buffer.get(), "a group without a version was rejected")).number == 0

    async def test_without_a_limit_nothing_is_too_old(self) -> None:
        bench = Bench(self)
        await bench.put(0, version=0)
        bench.version = 1000
        assert (await self._soon(bench.buffer.get(), "a group was rejected without a limit")).number == 0

    async def test_cancelled_calls_lose_nothing(self) -> None:
        bench = Bench(self)
        getting = asyncio.create_task(bench.buffer.get())
        await asyncio.sleep(0.01)
        getting.cancel()
        await asyncio.gather(getting, return_exceptions=True)
        await self._soon(bench.put(*range(self.capacity)), "a cancelled get took a group along")
        late = asyncio.create_task(bench.put(50))
        await asyncio.sleep(0.01)
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        held = [(await self._soon(bench.buffer.get(), "a group was lost")).number for _ in range(self.capacity)]
        assert sorted(held) == list(range(self.capacity)), f"a cancelled put left group 50 in, or took one out: {held}"

    async def test_many_at_once_all_come_through(self) -> None:
        bench, rng = Bench(self), random.Random(0)
        numbers = list(range(40))

        async def put(number: int) -> None:
            await asyncio.sleep(rng.random() / 100)
            await bench.put(number, reward=float(number % 5 > 0))

        wanted = [number for number in numbers if number % 5]

        async def full() -> None:
            while bench.buffer.metrics()["size"] < self.capacity:  # noqa: ASYNC110 - a test looks from outside
                await asyncio.sleep(0.001)

        putting = asyncio.gather(*(put(number) for number in numbers))
        await self._soon(full(), "many puts do not fill the buffer")
        found = [(await self._soon(bench.buffer.get(), "groups are missing")).number for _ in wanted]
        await putting
        assert sorted(found) == wanted
        assert sorted(number for number, _ in bench.rejected) == [number for number in numbers if number % 5 == 0]
