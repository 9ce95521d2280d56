"""The producer: a steady budget in flight, whole groups, backpressure, and books that add up whatever goes wrong."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from miles_core.config.spec import RolloutSpec
from miles_core.data.order import PromptStream
from miles_core.errors import PluginError, RunError
from miles_core.kinds.data_buffer import FinishedGroup
from miles_core.kinds.environment import EpisodeResult, SessionHandle
from miles_core.options import BoundedBufferOptions
from miles_core.rollout import group_file
from miles_core.rollout.budget import Budget
from miles_core.rollout.buffer import BoundedBuffer
from miles_core.rollout.episode import Episodes
from miles_core.rollout.ledger import Fate
from miles_core.rollout.producer import Producer
from miles_core.rollout.rewards import RewardPool
from miles_core.rollout.scheduler import GroupFilter, first_error
from miles_core.testing.scripted_session import ScriptedSessions, assemble_scripted
from miles_core.testing.virtual_time import in_virtual_time, run_virtual
from miles_core.testing.waiting import until
from miles_core.types import Group, Message, Prompt, Status, Trajectory

Wait = Callable[[Prompt, int], float]
"""Seconds that an episode of a prompt takes, given how many ran before it."""


class Waiting:
    """An environment that waits, then takes one answer."""

    def __init__(self, seconds: Wait) -> None:
        self._seconds = seconds
        self.started = 0

    def prompts(self, split: str) -> Sequence[Prompt] | None:
        return None

    async def run(self, prompt: Prompt, session: SessionHandle) -> EpisodeResult:
        number, self.started = self.started, self.started + 1
        await asyncio.sleep(self._seconds(prompt, number))
        await session.complete(prompt.messages)
        return EpisodeResult(reward=float(number % 3))

    async def close(self) -> None: ...


class Bench:
    def __init__(self, seconds: Wait = lambda prompt, number: 0.0, *, prompts: int = 1000, **budget: Any) -> None:
        items = [Prompt(id=f"q{i}", messages=(Message(role="user", content=f"q{i}"),)) for i in range(prompts)]
        self.version = 0
        self.environment = Waiting(seconds)
        self.stream = PromptStream(items, seed=0)
        self.budget = Budget(**{"groups_per_step": 2, "group_size": 4, "samples": 16, **budget})

    def producer(
        self,
        *,
        filters: Sequence[GroupFilter] = (),
        assemble: Callable[..., Trajectory] | None = None,
        **spec: Any,
    ) -> Producer:
        episodes = Episodes(
            environment=self.environment,  # type: ignore[arg-type]
            sessions=ScriptedSessions(lambda asked: "x"),
            rewards=RewardPool((), workers=1, timeout_s=1.0),
            seed=0,
            timeout_s=60.0,
            assemble=assemble or self.assemble,
        )
        return Producer(
            stream=self.stream,
            episodes=episodes,
            spec=RolloutSpec(**spec),
            filters=filters,
            budget=self.budget,
            make_buffer=partial(BoundedBuffer, BoundedBufferOptions()),
            version=lambda: self.version,
        )

    def assemble(self, session: Any, **facts: Any) -> Trajectory:
        """Sampled by whatever version is published when the episode ends."""
        row = assemble_scripted(session, **facts)
        return replace(row, spans=tuple(replace(span, weight_version=self.version) for span in row.spans))


@asynccontextmanager
async def running(producer: Producer) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(producer.run())
    try:
        yield task
    finally:
        await producer.drain(task, 0.0)


async def until_queued(producer: Producer, groups: int) -> None:
    await until(lambda: len(producer.ledger.numbers(Fate.QUEUED)) >= groups, deadline_s=5)


def uneven(prompt: Prompt, number: int) -> float:
    """Every fourth episode takes ten times as long."""
    return 100.0 if number % 4 == 3 else 10.0


@pytest.mark.parametrize(("refill", "steady"), [("sample", True), ("group", False)])
def test_refill_by_sample_keeps_the_budget_in_flight_though_lengths_differ_tenfold(refill: str, steady: bool) -> None:
    async def mean_in_flight() -> float:
        producer = Bench(uneven, samples=48, refill=refill, groups_per_step=8).producer()
        async with running(producer):
            producer.trained(await producer.take(8))
            producer.in_flight.mean()
            for _ in range(20):
                producer.trained(await producer.take(8))
            mean = producer.in_flight.mean()
        assert producer.in_flight.highest <= 48
        return mean

    mean = run_virtual(mean_in_flight())
    assert (mean >= 0.9 * 48) == steady, f"{mean:.1f} of 48 in flight"


@in_virtual_time
async def test_groups_come_whole_and_a_full_buffer_stops_the_start_of_more() -> None:
    bench = Bench()
    producer = bench.producer()
    async with running(producer):
        await until_queued(producer, 4)
        await asyncio.sleep(0.02)
        started = bench.environment.started
        await asyncio.sleep(0.02)
        assert bench.environment.started == started, "the rollout goes on though the buffer is full"
        producer.check()
        for finished in await producer.take(10):
            assert len(finished.group.trajectories) == 4
        await asyncio.sleep(0.02)
        assert bench.environment.started > started, "room in the buffer started nothing"


@in_virtual_time
async def test_a_group_over_the_limit_when_it_would_be_trained_is_rejected_and_its_prompt_tried_again() -> None:
    bench = Bench(max_weight_staleness=1, unused="retry")
    producer = bench.producer()
    async with running(producer):
        await until_queued(producer, 4)
        bench.version = 1
        producer.trained(await producer.take(1))
        bench.version = 2
        producer.published()
        (found,) = await producer.take(1)
        producer.trained([found])
        producer.check()
    counts = producer.ledger.counts
    assert counts["stale"] >= 3, counts
    assert counts["put_back"] == counts["stale"]
    assert all(span.weight_version >= 1 for row in found.group.trajectories for span in row.spans)
    assert len({row.session_id for row in found.group.trajectories}) == 4


@in_virtual_time
async def test_a_version_published_while_a_batch_is_collected_is_noticed() -> None:
    bench = Bench(max_weight_staleness=0, samples=4)
    producer = bench.producer()
    async with running(producer):
        await producer.take(1)

        def publish(taken: int) -> None:
            bench.version = 1  # as a recovery of an engine may do while the loop waits for a batch

        (found,) = await producer.take(1, publish)
    assert {span.weight_version for row in found.group.trajectories for span in row.spans} == {1}
    assert producer.ledger.counts["stale"] >= 1


@in_virtual_time
async def test_with_a_limit_nothing_is_started_that_would_be_discarded() -> None:
    bench = Bench(max_weight_staleness=1, samples=64, groups_per_step=2)
    producer = bench.producer()
    async with running(producer):
        for _ in range(10):
            batch = await producer.take(2)
            await asyncio.sleep(0.005)  # training
            producer.trained(batch)
            producer.check()
            await asyncio.sleep(0.005)  # saving and publishing
            bench.version += 1
            producer.published()
    assert producer.ledger.counts["stale"] == 0
    assert producer.ledger.counts["trained"] == 20


@in_virtual_time
@pytest.mark.parametrize(("limit", "interval"), [(0, 1), (0, 3), (1, 2)])
async def test_no_limit_and_no_interval_makes_what_would_be_discarded(limit: int, interval: int) -> None:
    bench = Bench(lambda prompt, number: 0.001, max_weight_staleness=limit, update_interval=interval, samples=64)
    producer = bench.producer()
    async with running(producer), asyncio.timeout(10):
        for step in range(1, 13):
            batch = await producer.take(2)
            assert {producer._age(finished.group) for finished in batch} <= set(range(limit + 1))
            await asyncio.sleep(0.003)
            producer.trained(batch)
            await asyncio.sleep(0.003)  # saving takes time too
            if step % interval == 0:
                bench.version += 1
                producer.published()
            producer.check()
    assert producer.ledger.counts["stale"] == 0
    assert producer.ledger.counts["trained"] == 24


@in_virtual_time
@pytest.mark.parametrize("unused", ["drop", "retry"])
@pytest.mark.parametrize("interval", [1, 2])
async def test_with_a_limit_of_zero_discarded_groups_make_room_for_fresh_ones(unused: str, interval: int) -> None:
    bench = Bench(lambda prompt, number: 0.001, max_weight_staleness=0, update_interval=interval, unused=unused)
    producer = bench.producer()
    async with running(producer):
        for _ in range(4):
            await until_queued(producer, 2 * interval)
            bench.version += 1  # as an evaluation makes it happen ahead of the interval: all that waits is too old now
            producer.published()
            taken = await asyncio.wait_for(producer.take(2), 5)
            assert {producer._age(finished.group) for finished in taken} == {0}
            producer.trained(taken)
            producer.check()
            bench.version += 1
            producer.published()


@in_virtual_time
async def test_nothing_starts_while_held_and_everything_goes_on_after() -> None:
    bench = Bench()
    producer = bench.producer()
    async with running(producer):
        await producer.take(1)
        async with producer.held():
            await asyncio.sleep(0.01)
            started = bench.environment.started
            await producer.take(1)
            await asyncio.sleep(0.01)
            assert bench.environment.started == started
        await producer.take(10)
        await asyncio.sleep(0.01)
        assert bench.environment.started > started


@in_virtual_time
async def test_filters_that_keep_nothing_end_the_run_with_their_counts() -> None:
    producer = Bench().producer(filters=[GroupFilter(name="never", judge=lambda group: "dull")], max_waves=3)
    with pytest.raises(ExceptionGroup) as raised:
        async with asyncio.timeout(5):
            await producer.run()
    error = raised.group_contains(RunError) and first_error(raised.value)
    assert "0 accepted, 6 judged; dropped: dull 6" in str(error)
    assert "rollout.max_waves" in str(error)


@in_virtual_time
async def test_one_group_kept_in_time_lets_the_rollout_go_on() -> None:
    judged = itertools.count(1)
    keep_each_sixth = GroupFilter(name="rare", judge=lambda group: None if next(judged) % 6 == 0 else "dull")
    producer = Bench().producer(filters=[keep_each_sixth], max_waves=3)
    async with running(producer), asyncio.timeout(5):
        assert len(await producer.take(4)) == 4


@in_virtual_time
async def test_what_breaks_the_producer_surfaces_before_any_queued_group() -> None:
    calls: list[int] = []

    def broken(group: Group) -> Any:
        calls.append(1)
        return 7 if len(calls) > 2 else None

    producer = Bench().producer(filters=[GroupFilter(name="broken", judge=broken)])
    with pytest.raises(ExceptionGroup) as caught:
        await producer.run()
    assert caught.group_contains(PluginError, match="gave no verdict")


@in_virtual_time
async def test_a_drain_finishes_what_runs_and_cuts_what_does_not_end() -> None:
    bench = Bench(lambda prompt, number: 0.05 if number < 8 else 60.0)
    producer = bench.producer()
    task = asyncio.create_task(producer.run())
    await asyncio.sleep(0.01)
    await producer.drain(task, 0.2)
    producer.check()
    state, groups = producer.state()
    assert len(groups) == 2
    assert len(state["in_flight"]) == 2
    assert len(asyncio.all_tasks()) == 1


@in_virtual_time
async def test_a_cancelled_take_puts_its_groups_back_in_order() -> None:
    producer = Bench(lambda prompt, number: 0.01 + number / 10_000).producer()  # groups end in the order they began in
    async with running(producer):
        taking = asyncio.create_task(producer.take(10_000))
        await asyncio.sleep(0.05)
        assert producer.ledger.counts["taken"] > 0
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        producer.check()
        assert producer.ledger.counts["taken"] == 0
        numbers = [finished.number for finished in await producer.take(3)]
    assert numbers == sorted(numbers)


@in_virtual_time
@pytest.mark.parametrize("seed", range(4))
async def test_books_add_up_whatever_fails_and_over_restarts(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    trained: list[str] = []
    saved: tuple[dict[str, Any], list[FinishedGroup], dict[str, Any]] | None = None
    bench = Bench(lambda prompt, number: rng.random() / 300, max_weight_staleness=2, unused="retry", prompts=30)

    def assemble(session: Any, **facts: Any) -> Trajectory:
        row = bench.assemble(session, **facts)
        return replace(row, status=Status.ABORTED) if rng.random() < 0.3 else row

    def keep(group: Group) -> str | None:
        return "unlucky" if rng.random() < 0.2 else None

    for _ in range(4):
        producer = bench.producer(filters=[GroupFilter(name="keep", judge=keep)], assemble=assemble, retries=1)
        if saved is not None:
            bench.stream.restore(saved[2])
            group_file.write(tmp_path, saved[1])
            producer.restore(saved[0], group_file.read(tmp_path, bench.stream.prompt))
            assert producer.ledger.counts["cut"] > 0
        task = asyncio.create_task(producer.run())
        for _ in range(rng.randrange(2, 5)):
            batch = await asyncio.wait_for(producer.take(2), 10)
            trained += [row.session_id for finished in batch for row in finished.group.trajectories]
            producer.trained(batch)
            producer.check()
            state, groups = producer.state()
            saved = (json.loads(json.dumps(state)), groups, bench.stream.state())
            bench.version += rng.randrange(3)
            producer.published()
        await producer.drain(task, 0.0)  # killed: what happened since `saved` is forgotten
        producer.check()
    assert len(trained) == len(set(trained)), "a trajectory was trained twice"


def test_the_time_under_the_limit_on_age_is_measured() -> None:
    async def share(limit: int | None) -> float:
        producer = Bench(lambda prompt, number: 10.0, samples=16, max_weight_staleness=limit).producer()
        async with running(producer):
            taken = await producer.take(2)
            producer.gauges([])
            await asyncio.sleep(30.0)  # the trainer is busy, and with a limit of 0 nothing may start
            producer.trained(taken)
            return producer.gauges([])["async/limited_fraction"]

    assert run_virtual(share(0)) == pytest.approx(1.0, abs=0.05)
    assert run_virtual(share(None)) == 0.0
