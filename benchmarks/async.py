"""The same job in turns, one step off, and fully asynchronous: what overlaps, and how old data gets.

    python benchmarks/async.py [--steps 60] [--waves 12] [--scale 0.25] [--virtual] [--job NAME ...]

An environment that sleeps stands for engines and tools, a trainer that sleeps for the optimizer; everything between is
the real thing: the wave scheduler, the producer, the buffer, the ledger. Lengths are log-normal; 95% of them lie within
a factor of ten. Both phases are set to take equal time where the job is balanced. `bound` is the time of the slower
phase alone, with nothing waiting for anything. All ratios come from one run on one machine.

`--virtual` runs on a clock that jumps: exact, in seconds, and blind to the cost of the bookkeeping.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from miles_core.config.spec import RolloutSpec
from miles_core.contracts.versions import group_staleness
from miles_core.data.order import PromptStream
from miles_core.kinds.environment import EpisodeResult, SessionHandle
from miles_core.options import BoundedBufferOptions
from miles_core.rollout.budget import Budget
from miles_core.rollout.buffer import BoundedBuffer
from miles_core.rollout.episode import Episodes
from miles_core.rollout.producer import Producer
from miles_core.rollout.rewards import RewardPool
from miles_core.rollout.scheduler import collect
from miles_core.testing.scripted_session import ScriptedSessions, assemble_scripted
from miles_core.testing.virtual_time import run_virtual
from miles_core.types import Group, Message, Prompt, Trajectory

GROUPS, SIZE = 8, 8
SIGMA = math.log(10) / (2 * 1.96)
"""Of a log-normal whose central 95% spans a factor of ten."""


@dataclass(frozen=True)
class Job:
    name: str
    sigma: float
    train_share: float
    """Seconds of a training step over the mean seconds of generating a batch with the budget always full."""
    samples: int
    limit: int | None = None

    @property
    def generate_s(self) -> float:
        """Seconds of a batch when the budget is always full and a trajectory takes 1 second on average."""
        return GROUPS * SIZE / self.samples


JOBS = (
    Job("balanced, equal lengths", 0.05, 1.0, 64),
    Job("balanced, tenfold spread", SIGMA, 1.0, 64),
    Job("agentic, hundredfold spread", 2 * SIGMA, 1.0, 128),
    Job("agentic, limit 2", 2 * SIGMA, 1.0, 128, limit=2),
    Job("trainer-bound", SIGMA, 2.0, 64),
)


class Sleeping:
    """An environment whose episodes take log-normal time with mean `scale`."""

    def __init__(self, sigma: float, scale: float) -> None:
        self._rng, self._sigma, self._scale = random.Random(0), sigma, scale

    def prompts(self, split: str) -> Sequence[Prompt] | None:
        return None

    async def run(self, prompt: Prompt, session: SessionHandle) -> EpisodeResult:
        await asyncio.sleep(self._scale * self._rng.lognormvariate(-(self._sigma**2) / 2, self._sigma))
        await session.complete(prompt.messages)
        return EpisodeResult(reward=self._rng.random())

    async def close(self) -> None: ...


class Bench:
    """One job under one schedule."""

    def __init__(self, job: Job, scale: float) -> None:
        prompts = [Prompt(id=f"p{i}", messages=(Message(role="user", content="?"),)) for i in range(100_000)]
        self.job, self.scale, self.version = job, scale, 0
        self.stream = PromptStream(prompts, seed=0)
        self.ages: list[int] = []
        self.waited = self.stale = 0.0
        self.episodes = Episodes(
            environment=Sleeping(job.sigma, scale),  # type: ignore[arg-type]
            sessions=ScriptedSessions(lambda asked: "x"),
            rewards=RewardPool((), workers=1, timeout_s=1.0),
            seed=0,
            timeout_s=3600.0,
            assemble=self._assemble,
        )

    def _assemble(self, session: Any, **facts: Any) -> Trajectory:
        row = assemble_scripted(session, **facts)
        return replace(row, spans=tuple(replace(span, weight_version=self.version) for span in row.spans))

    async def train(self, groups: Sequence[Group]) -> None:
        for group in groups:
            age = group_staleness(group, self.version)
            assert age is not None
            self.ages.append(age.s_old)
        await asyncio.sleep(self.scale * self.job.train_share * self.job.generate_s)
        self.version += 1

    async def wave(self, step: int) -> Sequence[Group]:
        spec = RolloutSpec(max_concurrent=self.job.samples)
        found = await collect(
            step, stream=self.stream, episodes=self.episodes, spec=spec, groups=GROUPS, group_size=SIZE
        )
        return found.groups

    async def sync(self, steps: int) -> None:
        for step in range(steps):
            began = asyncio.get_running_loop().time()
            groups = await self.wave(step)
            self.waited += asyncio.get_running_loop().time() - began
            await self.train(groups)

    async def one_step_off(self, steps: int) -> None:
        clock = asyncio.get_running_loop().time
        groups = await self.wave(0)
        for step in range(steps):
            following = asyncio.create_task(self.wave(step + 1))
            await self.train(groups)
            began = clock()
            groups = await following
            self.waited += clock() - began

    async def fully_async(self, steps: int) -> None:
        clock = asyncio.get_running_loop().time
        budget = Budget(
            groups_per_step=GROUPS, group_size=SIZE, samples=self.job.samples, max_weight_staleness=self.job.limit
        )
        producer = Producer(
            stream=self.stream,
            episodes=self.episodes,
            spec=RolloutSpec(),
            filters=(),
            budget=budget,
            make_buffer=partial(BoundedBuffer, BoundedBufferOptions()),
            version=lambda: self.version,
        )
        task = asyncio.create_task(producer.run())
        for step in range(steps):
            producer.step, began = step, clock()
            taken = await producer.take(GROUPS)
            self.waited += clock() - began
            await self.train([finished.group for finished in taken])
            producer.trained(taken)
            producer.published()
            producer.check()
        self.stale = producer.ledger.counts["stale"]
        await producer.drain(task, 0.0)


async def measure(job: Job, schedule: str, steps: int, scale: float) -> tuple[float, Bench]:
    """Seconds a step in units of the mean episode, and the bench afterwards."""
    bench = Bench(job, scale)
    clock = asyncio.get_running_loop().time
    began = clock()
    await getattr(bench, schedule)(steps)
    seconds = (clock() - began) / steps / scale
    bench.waited /= clock() - began
    return seconds, bench


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60, help="steps of the fully asynchronous schedule")
    parser.add_argument("--waves", type=int, default=12, help="steps of the others, which are slower and vary less")
    parser.add_argument("--job", choices=[job.name for job in JOBS], nargs="*", help="only these")
    parser.add_argument("--scale", type=float, default=0.25, help="seconds of a mean episode")
    parser.add_argument("--virtual", action="store_true")
    arguments = parser.parse_args()
    run = run_virtual if arguments.virtual else asyncio.run
    counts = f"{arguments.steps} steps, {arguments.waves} in waves"
    print(f"{counts}, of {GROUPS} groups of {SIZE}; time in mean episodes; {time.strftime('%Y-%m-%d')}")
    header = ("job", "schedule", "step", "vs sync", "of bound", "trainer idle", "S_old mean", "max", "stale")
    print("| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    for job in (job for job in JOBS if not arguments.job or job.name in arguments.job):
        bound = max(job.generate_s, job.train_share * job.generate_s)
        base = 0.0
        for schedule in ("sync", "one_step_off", "fully_async"):
            steps = arguments.steps if schedule == "fully_async" else arguments.waves
            seconds, bench = run(measure(job, schedule, steps, arguments.scale))
            base = base or seconds
            ages = bench.ages
            cells = (
                job.name,
                schedule.replace("_", "-"),
                f"{seconds:.2f}",
                f"{base / seconds:.2f}x",
                f"{bound / seconds:.0%}",
                f"{bench.waited:.0%}",
                f"{sum(ages) / len(ages):.2f}",
                str(max(ages)),
                f"{bench.stale:.0f}",
            )
            print("| " + " | ".join(cells) + " |", flush=True)
    if not arguments.virtual:  # a busy host wakes sleepers late, and the faster the schedule, the more that counts
        print(f"load average {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
