"""The simulator against the real producer and buffer, run in virtual time: the same job, within a tenth."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import mean
from typing import Any

import pytest

from miles_core.config.spec import RolloutSpec
from miles_core.contracts.versions import group_staleness
from miles_core.data.order import PromptStream
from miles_core.kinds.environment import EpisodeResult, SessionHandle
from miles_core.options import BoundedBufferOptions
from miles_core.planning.events import EngineSpeed
from miles_core.planning.overlap import Forecast, Job, forecast
from miles_core.planning.workload import Workload, constant, log_normal
from miles_core.rollout.budget import Budget
from miles_core.rollout.buffer import BoundedBuffer
from miles_core.rollout.episode import Episodes
from miles_core.rollout.producer import Producer
from miles_core.rollout.rewards import RewardPool
from miles_core.testing.scripted_session import ScriptedSessions, assemble_scripted
from miles_core.testing.virtual_time import run_virtual
from miles_core.types import Message, Prompt, Trajectory

STEPS = 150
TAIL = Workload(turns=constant(1), tokens=constant(1), wait_s=log_normal(20, spread=10))
"""Tools take all the time and no engine is short, so that an episode is its wait."""


class Slow:
    """An environment that waits as the workload says, then takes one answer."""

    def __init__(self, workload: Workload) -> None:
        self._draw, self._rng = workload.wait_s, random.Random(7)

    def prompts(self, split: str) -> Sequence[Prompt] | None:
        return None

    async def run(self, prompt: Prompt, session: SessionHandle) -> EpisodeResult:
        await session.complete(prompt.messages)
        await asyncio.sleep(self._draw(self._rng))
        return EpisodeResult(reward=1.0)

    async def close(self) -> None: ...


async def measured(job: Job) -> dict[str, float]:
    """Step time, mean in flight and age of the real parts, with a trainer that only waits."""
    version = 0
    started: dict[str, int] = {}

    def assemble(session: Any, **facts: Any) -> Trajectory:
        row = assemble_scripted(session, **facts)
        return replace(row, spans=tuple(replace(span, weight_version=started[row.session_id]) for span in row.spans))

    class Marking(ScriptedSessions):
        def open(self, session_id: str, *args: Any, **kwargs: Any) -> Any:
            started[session_id] = version
            return super().open(session_id, *args, **kwargs)

    prompts = [Prompt(id=f"q{i}", messages=(Message(role="user", content=f"q{i}"),)) for i in range(200)]
    producer = Producer(
        stream=PromptStream(prompts, seed=0),
        episodes=Episodes(
            environment=Slow(job.workload),  # type: ignore[arg-type]
            sessions=Marking(lambda asked: "x"),
            rewards=RewardPool((), workers=1, timeout_s=1.0),
            seed=0,
            timeout_s=1e6,
            assemble=assemble,
        ),
        spec=RolloutSpec(),
        filters=(),
        budget=Budget(
            groups_per_step=job.groups_per_step,
            group_size=job.group_size,
            samples=job.max_concurrent_samples,
            refill=job.refill,
            max_weight_staleness=job.max_weight_staleness,
        ),
        make_buffer=partial(BoundedBuffer, BoundedBufferOptions(capacity_factor=job.capacity_factor)),
        version=lambda: version,
    )
    task = asyncio.create_task(producer.run())
    clock = asyncio.get_running_loop().time
    ages, stops = [], [0.0]
    for step in range(STEPS):
        producer.step = step
        taken = await producer.take(job.groups_per_step)
        for finished in taken:
            found = group_staleness(finished.group, version)
            assert found is not None
            ages.append(found.s_old)
        await asyncio.sleep(job.train_s)
        producer.trained(taken)
        version += 1
        producer.published()
        stops.append(clock())
    in_flight = producer.in_flight.mean()
    await producer.drain(task, 0.0)
    return {"step_s": (stops[-1] - stops[1]) / (STEPS - 1), "in_flight": in_flight, "staleness_mean": mean(ages)}


@pytest.mark.parametrize(
    "changes",
    [
        {"train_s": 1.0},  # rollout-bound
        {"train_s": 40.0},  # about balanced
        {"train_s": 120.0},  # trainer-bound: the buffer fills
        {"train_s": 1.0, "refill": "group"},
        {"train_s": 40.0, "max_weight_staleness": 1},
    ],
    ids=str,
)
def test_the_forecast_is_within_a_tenth_of_what_the_real_producer_does(changes: dict[str, Any]) -> None:
    job = Job(
        mode="fully-async",
        workload=TAIL,
        speed=EngineSpeed(peak=1e12),
        train_s=1.0,
        publish_s=0.0,
        groups_per_step=4,
        group_size=4,
        max_concurrent_samples=32,
        steps=STEPS,
    )
    job = replace(job, **changes)
    found = run_virtual(measured(job))
    planned: Forecast = forecast(job)
    assert planned.step_s == pytest.approx(found["step_s"], rel=0.1)
    assert planned.in_flight == pytest.approx(found["in_flight"], rel=0.1)
    assert planned.staleness_mean == pytest.approx(found["staleness_mean"], rel=0.15, abs=0.15)
