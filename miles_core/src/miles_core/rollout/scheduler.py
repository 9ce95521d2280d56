"""`collect`: from prompts to the scored groups of one step, in waves.

A wave starts `over_sample` times as many groups as are still needed. Groups are judged (kept or dropped) in the order
in which their *generation* ended, in whatever order their rewards arrive, and the next wave starts when the last group
of this one is judged. So the engine's order alone decides which groups are trained, and equal seeds give equal steps.
For the same reason a trajectory makes room for the next one when its generation ends, not when its reward is there.

Once enough groups are accepted, the surplus is aborted. Its prompts are not drawn again before the next epoch: if they
were put back, the slowest prompts would begin every wave and be aborted every time. Over-sampling therefore favours
prompts with short answers, and is off by default.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles_core import watch
from miles_core.config.spec import RolloutSpec, SamplingSpec
from miles_core.data.order import Draw, PromptStream
from miles_core.errors import PluginError, RunError
from miles_core.rollout.episode import SCORED, EpisodeKey, Episodes
from miles_core.rollout.tally import Tally
from miles_core.types import Group, SamplingParams, Trajectory
from miles_core.user_function import in_words

NO_TRAINABLE = "no_trainable"
"""The reason for dropping a group in which no trajectory can be trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFilter:
    """A picked filter, bound to its options."""

    name: str
    judge: Callable[..., str | None]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The groups of one step, and what became of everything that was started for it."""

    groups: tuple[Group, ...]
    """Accepted groups, in the order in which their generation ended."""
    stats: dict[str, float]
    """Metrics ``rollout/…`` of judged groups. Seed and run-file decide them."""
    wasted: dict[str, float]
    """Metrics ``rollout/…`` of the aborted surplus. The clock decides them."""
    rewards: tuple[float, ...]
    """Rewards of all scored trajectories of judged groups, those of dropped groups included."""
    failures: Mapping[str, str]
    """The message of the last failure at each boundary."""


def sampling_params(spec: SamplingSpec) -> SamplingParams:
    """The run-file's sampling section as an engine takes it."""
    return SamplingParams(**spec.model_dump())


async def collect(
    step: int,
    *,
    stream: PromptStream,
    episodes: Episodes,
    spec: RolloutSpec,
    filters: Sequence[GroupFilter] = (),
    groups: int,
    group_size: int,
    on_accept: Callable[[int], None] | None = None,
) -> Collected:
    """Collect `groups` accepted groups of `group_size` trajectories.

    Args:
        step: The step that is collected; it is part of the sessions' names.
        stream: Where prompts come from.
        on_accept: Called with the number of groups accepted so far.

    Raises:
        RunError: after `spec.max_waves` waves there are too few groups; says what dropped the others.
        PluginError: a filter raised, or broke its protocol.
    """
    tally = Tally(group_size=group_size)
    accepted: list[Group] = []

    def accept(group: Group) -> None:
        accepted.append(group)
        if on_accept is not None:
            on_accept(len(accepted))

    for _ in range(spec.max_waves):
        needed = groups - len(accepted)
        # 25 * 1.12 is 28.000000000000004: without the tolerance a wave would be one group larger than asked for.
        draws = stream.take(math.ceil(needed * spec.over_sample - 1e-9))
        tally.waves += 1
        wave = _Wave(step=step, episodes=episodes, spec=spec, filters=filters, group_size=group_size, tally=tally)
        await wave.run(draws, needed, accept)
        if len(accepted) == groups:
            return Collected(
                groups=tuple(accepted),
                stats=tally.stats(accepted),
                wasted=tally.wasted(),
                rewards=tuple(tally.rewards),
                failures=tally.last_failures(),
            )
    raise too_few(step, tally, expected=f"{groups} groups within {spec.max_waves} waves")


def too_few(step: int, tally: Tally, *, expected: str) -> RunError:
    """The error to raise when filters and failures leave too few groups."""
    dropped = ", ".join(f"{reason} {count}" for reason, count in sorted(tally.filtered.items()))
    failures = "".join(
        f"\n            last failure at {where}: {what}" for where, what in tally.last_failures().items()
    )
    remedy = "give the model easier or more varied prompts, raise rollout.max_waves, or remove the filter"
    if set(tally.filtered) <= {NO_TRAINABLE}:
        remedy = "fix what fails"
    return RunError(
        f"step {step} collected too few groups",
        expected=expected,
        found=f"{tally.judged - tally.filtered.total()} accepted, {tally.judged} judged; dropped: {dropped}{failures}",
        where="rollout",
        do=remedy,
    )


class _Run:
    """A group in progress."""

    def __init__(self, draw: Draw, size: int) -> None:
        self.draw = draw
        self.generating = size
        """How many samples have an attempt that is still generating."""
        self.unscored = size
        """How many samples have no final trajectory yet."""
        self.samples: list[Trajectory | None] = [None] * size
        self.attempts: list[Trajectory] = []
        """All finished attempts, also those that were tried again."""
        self.started = 0
        self.retried = 0

    def group(self) -> Group:
        done = tuple(trajectory for trajectory in self.samples if trajectory is not None)
        assert len(done) == len(self.samples), "a group is judged before its last sample was final"
        return Group(prompt=self.draw.prompt, trajectories=done)


class _Wave:
    """The groups started together, and the order in which they may be judged."""

    def __init__(
        self,
        *,
        step: int,
        episodes: Episodes,
        spec: RolloutSpec,
        filters: Sequence[GroupFilter],
        group_size: int,
        tally: Tally,
    ) -> None:
        self._step = step
        self._episodes = episodes
        self._spec = spec
        self._params = sampling_params(spec.sampling)
        self._filters = filters
        self._group_size = group_size
        self._tally = tally
        self._gate = asyncio.Semaphore(spec.max_concurrent)  # first come, first served: keeps the order of submission
        self._line: list[_Run] = []
        """Groups that are not generating, in the order in which they stopped. The first is the next to be judged, once
        it is scored: every group that still generates will stop later. A group that tries a failed attempt again leaves
        the line."""
        self._changed = asyncio.Event()

    async def run(self, draws: Sequence[Draw], needed: int, on_accept: Callable[[Group], None]) -> None:
        """Start a group for each draw, and return when `needed` are accepted or all are judged. The others are
        cancelled."""
        runs = [_Run(draw, self._group_size) for draw in draws]
        self._tally.submitted += len(runs)
        accepted = 0
        waiting: list[_Run] = list(runs)
        try:
            async with asyncio.TaskGroup() as tasks:
                samples = [tasks.create_task(self._sample(run, i)) for run in runs for i in range(self._group_size)]
                while waiting and accepted < needed:
                    run = await self._next(accepted, needed)
                    waiting.remove(run)
                    group = run.group()
                    reason = judge(group, self._filters)
                    self._tally.judge(run.attempts, group, retried=run.retried, reason=reason)
                    if reason is None:
                        accepted += 1
                        on_accept(group)
                for task in samples:
                    task.cancel()
        except BaseExceptionGroup as several:
            raise (error := first_error(several)) from error.__cause__
        for run in waiting:
            self._tally.abort(run.attempts, started=run.started)

    async def _next(self, accepted: int, needed: int) -> _Run:
        """The next group to judge: the first in line, once it is scored."""
        with watch.waiting(
            f"step {self._step} ({accepted} of {needed} groups of this wave accepted)", on="running groups"
        ):
            while not self._line or self._line[0].unscored:
                self._changed.clear()
                await self._changed.wait()
        return self._line.pop(0)

    async def _sample(self, run: _Run, index: int) -> None:
        """One sample of a group: attempt after attempt, until one does not fail or no retry is left."""
        for attempt in range(self._spec.retries + 1):
            key = EpisodeKey(
                purpose="train",
                step=self._step,
                epoch=run.draw.epoch,
                draw=run.draw.number,
                sample=index,
                attempt=attempt,
            )
            async with self._gate:
                run.started += 1
                generated = await self._episodes.generate(run.draw.prompt, self._params, key)
            run.generating -= 1
            if not run.generating:
                self._line.append(run)
                self._changed.set()
            trajectory = await self._episodes.score(generated)
            run.attempts.append(trajectory)
            if trajectory.status in SCORED or attempt == self._spec.retries:
                run.samples[index] = trajectory
                run.unscored -= 1
                self._changed.set()
                return
            if not run.generating:
                self._line.remove(run)
            run.generating += 1
            run.retried += 1


def judge(group: Group, filters: Sequence[GroupFilter]) -> str | None:
    """Why a finished group cannot be trained, or None.

    Raises:
        PluginError: a filter raised, or broke its protocol.
    """
    if not group.trainable:
        return NO_TRAINABLE
    for picked in filters:
        try:
            reason = picked.judge(group, **picked.options)
        except Exception as error:  # a plugin's code may raise anything; the error says whose it is
            raise PluginError(
                f"filter {picked.name!r} raised {in_words(error)}", found=f"prompt {group.prompt.id!r}"
            ) from error
        if reason is not None and not (isinstance(reason, str) and reason):
            raise PluginError(
                f"filter {picked.name!r} gave no verdict",
                expected="None to keep the group, or a reason as text",
                found=repr(reason),
            )
        if reason is not None:
            return reason
    return None


def first_error(several: BaseExceptionGroup[BaseException]) -> BaseException:
    """The exception that ended a group of tasks. Others that were raised at the same time are added to it as notes.

    Raise it ``from`` its own ``__cause__``, which may be what a plugin raised.
    """
    flat: list[BaseException] = []
    queue: list[BaseException] = [several]
    while queue:
        error = queue.pop(0)
        if isinstance(error, BaseExceptionGroup):
            queue.extend(error.exceptions)
        else:
            flat.append(error)
    for other in flat[1:]:
        flat[0].add_note(f"at the same time: {type(other).__name__}: {other}")
    return flat[0]
