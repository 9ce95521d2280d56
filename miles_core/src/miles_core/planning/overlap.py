"""What a schedule makes of its phases: step time, idle shares, staleness, by discrete-event simulation.

The rules are those of the drivers: whole groups are submitted and consumed, a sample credit refills, the buffer is
bounded, age is judged when a batch is taken, a weight update pauses generation.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Literal

from miles_core.planning.events import Clock, EngineSpeed
from miles_core.planning.workload import Turn, Workload

Mode = Literal["sync", "one-step-off", "fully-async"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training job on paper."""

    mode: Mode
    workload: Workload
    speed: EngineSpeed
    train_s: float
    """Log-probs and optimizer steps of one batch."""
    publish_s: float
    """Pause of generation at a weight update."""
    groups_per_step: int
    group_size: int
    max_concurrent_samples: int
    """Trajectories in flight (fully-async)."""
    refill: Literal["sample", "group"] = "sample"
    capacity_factor: float = 2.0
    """Groups the buffer holds, as a multiple of `groups_per_step`."""
    max_weight_staleness: int | None = None
    update_weights_interval: int = 1
    steps: int = 50
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Means over the steps after the first, which also fills the pipeline."""

    first_step_s: float
    step_s: float
    step_median_s: float
    bound_s: float
    """No schedule is faster in the long run; see `bound`."""
    trainer_idle: float
    """Share of time in which the trainer waits."""
    engine_idle: float
    """Share of time in which no request is generating."""
    in_flight: float
    generating: float
    """Mean number of requests that sample tokens (the rest wait for tools)."""
    staleness_mean: float
    staleness_max: int
    """Versions between the oldest token of a trained group and the engines' version when it was taken."""
    stale_groups: int
    """Groups refused for their age."""
    tokens_per_s: float

    @property
    def efficiency(self) -> float:
        """Bound over step time. Above 1 only in a short run, whose steps live on what the first one left over."""
        return self.bound_s / self.step_s


@dataclass(slots=True)
class Group:
    version: int
    left: int
    tokens: float = 0.0


@dataclass(slots=True)
class Simulation:
    """The state of one simulated job; `forecast` runs it."""

    job: Job
    clock: Clock
    rng: random.Random
    version: int = 0
    trained: int = 0
    begun: int = 0
    served: int = 0
    """Steps whose training has begun, and those whose weights the engines have."""
    in_flight: int = 0
    pending_groups: int = 0
    buffer: deque[Group] = field(default_factory=deque)
    batch: list[Group] = field(default_factory=list)
    """Groups taken for the next step, while it is not whole."""
    training: bool = False
    stops: list[float] = field(default_factory=list)
    """When each step ended."""
    ages: list[int] = field(default_factory=list)
    stale: int = 0
    trained_tokens: float = 0.0
    training_s: float = 0.0
    in_flight_s: float = 0.0
    drawn: int = 0
    drawn_tokens: float = 0.0
    drawn_wait_s: float = 0.0
    _marked: float = 0.0

    # --- generation -----------------------------------------------------------------------------------------------

    def submit(self) -> None:
        self._mark()
        group = Group(self.version, self.job.group_size)
        self.in_flight += self.job.group_size
        self.pending_groups += 1
        for _ in range(self.job.group_size):
            self._turn(group, self._draw(), 0)

    def _draw(self) -> tuple[Turn, ...]:
        turns = self.job.workload.draw(self.rng)
        self.drawn += 1
        self.drawn_tokens += sum(turn.tokens for turn in turns)
        self.drawn_wait_s += sum(turn.wait_s for turn in turns)
        return turns

    def _turn(self, group: Group, turns: tuple[Turn, ...], at: int) -> None:
        if at == len(turns):
            return self._finished(group)
        turn = turns[at]
        group.tokens += turn.tokens
        wait: Callable[[], None] = lambda: self.clock.after(turn.wait_s, lambda: self._turn(group, turns, at + 1))  # noqa: E731
        self.clock.generate(turn.tokens, wait)

    def _finished(self, group: Group) -> None:
        self._mark()
        self.in_flight -= 1
        group.left -= 1
        if group.left == 0:
            self.pending_groups -= 1
            self.buffer.append(group)
        self.refill()
        self.train()

    def refill(self) -> None:
        """Keep the budget full (fully-async); other modes submit whole waves."""
        job = self.job
        if job.mode != "fully-async":
            return
        while self._has_room():
            self.submit()

    def _has_room(self) -> bool:
        job = self.job
        if len(self.buffer) > self._capacity():  # one of them waits for room in the real buffer
            return False
        if job.max_weight_staleness is not None:
            # What would be over the limit by the time it is trained is not begun.
            taken = len(self.batch) + (self.begun - self.served) * job.groups_per_step
            ahead = self.pending_groups + len(self.buffer) + taken
            if ahead // (job.groups_per_step * job.update_weights_interval) > job.max_weight_staleness:
                return False
        if job.refill == "sample":
            return self.in_flight + job.group_size <= job.max_concurrent_samples
        return self.pending_groups < max(1, job.max_concurrent_samples // job.group_size)

    def _capacity(self) -> int:
        return max(1, int(self.job.capacity_factor * self.job.groups_per_step))

    def wave(self) -> None:
        for _ in range(self.job.groups_per_step):
            self.submit()

    def _mark(self) -> None:
        self.in_flight_s += self.in_flight * (self.clock.now - self._marked)
        self._marked = self.clock.now

    # --- training -------------------------------------------------------------------------------------------------

    def train(self) -> None:
        job = self.job
        if self.training or self.trained >= job.steps:
            return
        # The trainer takes a group at a time, so a buffer may be smaller than a batch.
        while len(self.batch) < job.groups_per_step:
            self._drop_stale()
            if not self.buffer:
                return
            self.batch.append(self.buffer.popleft())
            self.refill()
        self.ages += [self.version - group.version for group in self.batch]
        self.trained_tokens += sum(group.tokens for group in self.batch)
        self.batch = []
        self.training = True
        self.begun += 1
        self.training_s += job.train_s
        self.clock.after(job.train_s, self._trained)
        if job.mode == "one-step-off":
            self.wave()
        self.refill()

    def _drop_stale(self) -> None:
        limit = self.job.max_weight_staleness
        if limit is None:
            return
        fresh = [group for group in self.buffer if self.version - group.version <= limit]
        self.stale += len(self.buffer) - len(fresh)
        self.buffer = deque(fresh)
        self.refill()

    def _trained(self) -> None:
        self.trained += 1
        if self.trained % self.job.update_weights_interval:
            return self._step_done()
        self.clock.pause()
        self.clock.after(self.job.publish_s, self._published)

    def _published(self) -> None:
        self.clock.resume()
        self.version += 1
        self.served = self.trained
        self._step_done()

    def _step_done(self) -> None:
        self.training = False
        self.stops.append(self.clock.now)
        if self.job.mode == "sync" and self.trained < self.job.steps:
            self.wave()
        self.train()


def forecast(job: Job) -> Forecast:
    """Simulate `job.steps` steps.

    Raises:
        ValueError: the job cannot make progress (a budget below one group, a staleness limit nothing can meet).
    """
    if job.mode == "fully-async" and job.max_concurrent_samples < job.group_size:
        raise ValueError(
            f"max_concurrent_samples={job.max_concurrent_samples} holds no group of {job.group_size} trajectories"
        )
    simulation = Simulation(job=job, clock=Clock(job.speed), rng=random.Random(job.seed))
    if job.mode == "fully-async":
        simulation.refill()
    else:
        simulation.wave()
    while simulation.trained < job.steps or simulation.training:
        if simulation.stale > 1000 * job.groups_per_step and not simulation.trained:
            raise ValueError("every group is too old when it is taken; raise the staleness limit")
        if not simulation.clock.step():
            raise ValueError("nothing left to do, and the steps are not done")
    return _summary(simulation)


def _summary(done: Simulation) -> Forecast:
    job, clock = done.job, done.clock
    durations = [after - before for before, after in zip([0.0, *done.stops], done.stops, strict=False)]
    later = durations[1:] or durations
    return Forecast(
        first_step_s=durations[0],
        step_s=mean(later),
        step_median_s=median(later),
        bound_s=bound(job, tokens=done.drawn_tokens / done.drawn, wait_s=done.drawn_wait_s / done.drawn),
        trainer_idle=1 - (done.training_s + job.publish_s * done.version) / clock.now,
        engine_idle=1 - clock.busy_s / clock.now,
        in_flight=done.in_flight_s / clock.now,
        generating=clock.generating_s / clock.now,
        staleness_mean=mean(done.ages),
        staleness_max=max(done.ages),
        stale_groups=done.stale,
        tokens_per_s=done.trained_tokens / clock.now,
    )


def bound(job: Job, *, tokens: float, wait_s: float) -> float:
    """Seconds of a step that no schedule beats in the long run on these machines.

    The longest of three: training and publishing back to back; all tokens of a batch sampled with the whole budget
    generating, while publishing stops it; and a batch out of the budget by Little's law, where trajectories that wait
    for tools do not generate and an update costs nothing, since tools go on.

    Args:
        tokens: Mean of a trajectory.
        wait_s: Mean time of a trajectory's tools.
    """
    batch = job.groups_per_step * job.group_size
    budget = job.max_concurrent_samples if job.mode == "fully-async" else batch
    publish_s = job.publish_s / job.update_weights_interval
    sampling = publish_s + batch * tokens * (budget + job.speed.half) / (budget * job.speed.peak)
    # Of `budget` trajectories in flight a share generates: solve n = budget * generating / (generating + wait).
    running = float(budget)
    for _ in range(200):
        generating_s = tokens * (running + job.speed.half) / job.speed.peak
        running = 0.5 * running + 0.5 * budget * generating_s / (generating_s + wait_s)
    occupancy = batch * (tokens * (running + job.speed.half) / job.speed.peak + wait_s) / budget
    return max(job.train_s + publish_s, sampling, occupancy)
