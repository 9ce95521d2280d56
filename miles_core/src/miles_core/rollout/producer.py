"""Producer: keeps a fixed budget of trajectories in flight for as long as the run lasts, and hands out whole groups.

Refill by sample (the default): every finished trajectory frees one credit, and as soon as there are credits for a whole
group, another one starts. So the number in flight stays near the budget even if lengths differ tenfold. If it is
refilled by group, the places of a group stay taken until its slowest trajectory ends. Groups are started and handed out
as a whole.

Nothing starts while a finished group waits for room in the data buffer: a full buffer holds the rollout back. What is
in flight continues. A weight update waits for none of it, so a full buffer cannot block an update.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from miles_core import watch
from miles_core.config.spec import RolloutSpec
from miles_core.contracts.versions import group_staleness
from miles_core.data.order import Draw, PromptStream
from miles_core.kinds.data_buffer import BufferContext, DataBuffer, FinishedGroup
from miles_core.rollout.budget import Budget
from miles_core.rollout.buffer import STALE, GuardedBuffer
from miles_core.rollout.episode import SCORED, EpisodeKey, Episodes
from miles_core.rollout.ledger import Fate, Ledger
from miles_core.rollout.occupancy import Occupancy
from miles_core.rollout.scheduler import NO_TRAINABLE, GroupFilter, judge, sampling_params, too_few
from miles_core.rollout.tally import Tally
from miles_core.types import Group, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A prompt to start a group for."""

    draw: Draw
    round: int = 0
    """How often its group was not trained and the prompt was put back. Every round samples with other seeds."""
    again: bool = False
    """Whether it was submitted before."""


@dataclass(slots=True)
class _Finished:
    """A finished group, until it is trained or given up."""

    finished: FinishedGroup
    order: Order
    attempts: Sequence[Trajectory]


class Producer:
    """See the module. `run` is the background task; everything else is called by the loop that trains.

    Args:
        stream: Where prompts come from.
        make_buffer: Makes the data buffer of the run from its context.
        version: Returns the weight version that is published now.
    """

    def __init__(
        self,
        *,
        stream: PromptStream,
        episodes: Episodes,
        spec: RolloutSpec,
        filters: Sequence[GroupFilter],
        budget: Budget,
        make_buffer: Callable[[BufferContext], DataBuffer],
        version: Callable[[], int],
    ) -> None:
        self._stream, self._episodes, self._spec, self._filters = stream, episodes, spec, filters
        self._params = sampling_params(spec.sampling)
        self._budget = budget
        self._version = version
        self.step = 0
        """Step whose batch is being collected; names sessions."""
        self.unpublished = 0
        """Groups trained since the last update of the interval."""
        self.ledger = Ledger()
        context = BufferContext(
            groups_per_step=budget.groups_per_step,
            max_weight_staleness=budget.max_weight_staleness,
            judge=lambda group: judge(group, filters),
            age=self._age,
            reject=self._reject,
        )
        self.buffer = GuardedBuffer(make_buffer(context))
        self._again: deque[Order] = deque()
        self._running: dict[int, Order] = {}
        self._whole: dict[int, _Finished] = {}
        """Finished groups until their end, in the order in which they were finished."""
        self._waiting: set[int] = set()
        """Finished groups on their way into the buffer."""
        self._returned: deque[FinishedGroup] = deque()
        self._holds = 0
        self._draining = False
        self._changed = asyncio.Event()
        clock = asyncio.get_running_loop().time
        self.in_flight = Occupancy(clock)
        self.queue = Occupancy(clock)
        self.blocked = Occupancy(clock)
        """1 while a full buffer holds the rollout back."""
        self.limited = Occupancy(clock)
        """1 while the limit on age does."""
        self._tally = Tally(group_size=budget.group_size)
        self._refused = 0
        """Groups in a row that failed or were filtered."""

    # --- the background task ------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Submit groups until `drain` is called. Returns when nothing is running any more.

        Raises:
            BaseExceptionGroup: with what broke. A failed trajectory is not an error here, but a broken contract or
                plugin is.
        """
        async with asyncio.TaskGroup() as tasks:
            for number in sorted(self._waiting):
                tasks.create_task(self._deliver(number))
            while not self._draining:
                if self._has_room():
                    self._submit(tasks)
                else:
                    await self._change("a free place for a group")

    def _has_room(self) -> bool:
        ahead = self.ledger.counts["pending"] + self.unpublished
        limited = self._budget.would_be_stale(ahead)
        self.limited.set(float(limited))
        if self._holds or self._waiting or limited:
            return False
        return self._budget.has_place(samples=self.in_flight.level, groups=len(self._running))

    def _submit(self, tasks: asyncio.TaskGroup) -> None:
        order = self._again.popleft() if self._again else Order(draw=self._stream.take(1)[0])
        number = self.ledger.submit(again=order.again)
        self._tally.submitted += 1
        self._running[number] = order
        self.in_flight.set(self.in_flight.level + self._budget.group_size)
        tasks.create_task(self._group(number, order), name=f"group {number}")

    async def _group(self, number: int, order: Order) -> None:
        attempts: list[Trajectory] = []
        async with asyncio.TaskGroup() as tasks:
            samples = [
                tasks.create_task(self._sample(order, index, attempts)) for index in range(self._budget.group_size)
            ]
        group = Group(prompt=order.draw.prompt, trajectories=tuple(sample.result() for sample in samples))
        self.ledger.move(number, Fate.FINISHED)
        del self._running[number]
        finished = FinishedGroup(number=number, group=group)
        self._whole[number] = _Finished(finished, order, attempts)
        self._waiting.add(number)
        await self._deliver(number)

    async def _sample(self, order: Order, index: int, attempts: list[Trajectory]) -> Trajectory:
        """Make attempts until one does not fail or the retries are used up. From then on its credit is free."""
        first = order.round * (self._spec.retries + 1)
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            for attempt in range(first, first + self._spec.retries + 1):
                key = EpisodeKey(
                    purpose="train",
                    step=self.step,
                    epoch=order.draw.epoch,
                    draw=order.draw.number,
                    sample=index,
                    attempt=attempt,
                )
                generated = await self._episodes.generate(order.draw.prompt, self._params, key)
                trajectory = await self._episodes.score(generated)
                attempts.append(trajectory)
                if trajectory.status in SCORED:
                    break
            return replace(trajectory, metadata={**trajectory.metadata, "seconds": round(clock() - began, 6)})
        finally:
            self.in_flight.set(self.in_flight.level - 1)
            self._notify()

    async def _deliver(self, number: int) -> None:
        """Put a finished group into the buffer, which may reject it or make it wait."""
        held = self._whole[number]
        self.blocked.set(1)
        try:
            with watch.waiting(f"group {number}", on="room in the data buffer"):
                await self.buffer.put(held.finished)
        finally:
            self.blocked.set(float(len(self._waiting) > 1))
        self._waiting.discard(number)
        if number in self.ledger.numbers(Fate.FINISHED):
            self.ledger.move(number, Fate.QUEUED)
            self._count(held, None)
        self._measure_queue()
        self._notify()

    # --- judgements ---------------------------------------------------------------------------------------------------

    def _age(self, group: Group) -> int | None:
        found = group_staleness(group, self._version())
        return None if found is None else found.s_old

    def _reject(self, finished: FinishedGroup, reason: str) -> None:
        held = self._whole.pop(finished.number, None)
        fate = {NO_TRAINABLE: Fate.FAILED, STALE: Fate.STALE}.get(reason, Fate.FILTERED)
        self.ledger.move(finished.number, fate, reason=reason if fate is Fate.FILTERED else None)
        assert held is not None  # the ledger refuses a number that is not pending
        if fate is not Fate.STALE:
            self._count(held, reason)
        if self._budget.unused == "retry" and fate is not Fate.FILTERED:
            self.ledger.put_back()
            self._again.append(replace(held.order, round=held.order.round + 1, again=True))
        self._notify()  # one group less is pending, and under a limit that alone may let the next one start

    def _count(self, held: _Finished, reason: str | None) -> None:
        retried = len(held.attempts) - len(held.finished.group.trajectories)
        if held.attempts:  # none are known of a group that a resumed run brought along
            self._tally.judge(held.attempts, held.finished.group, retried=retried, reason=reason)
        self._refused = 0 if reason is None else self._refused + 1
        if self._refused >= self._spec.max_waves * self._budget.groups_per_step:
            expected = f"one to train among {self._refused} in a row, which is rollout.max_waves times a batch"
            raise too_few(self.step, self._tally, expected=expected)

    # --- what the training loop asks ----------------------------------------------------------------------------------

    async def take(self, count: int, on_accept: Callable[[int], None] | None = None) -> list[FinishedGroup]:
        """Take the next `count` groups; none is over the age limit when this returns. If it is cancelled, nothing is
        taken."""
        taken: list[FinishedGroup] = []
        try:
            while True:
                while len(taken) < count:
                    taken.append(await self._take_one())
                    if on_accept is not None:
                        on_accept(len(taken))
                # A version may have been published while this waited.
                taken = [finished for finished in taken if not self._grown_stale(finished)]
                if len(taken) == count:
                    return taken
        except asyncio.CancelledError:
            for finished in reversed(taken):
                self.ledger.move(finished.number, Fate.QUEUED)
                self._returned.appendleft(finished)
            raise

    async def _take_one(self) -> FinishedGroup:
        with watch.waiting(f"step {self.step}", on="a finished group in the data buffer"):
            finished = self._returned.popleft() if self._returned else await self.buffer.get()
        if finished.number in self.ledger.numbers(Fate.FINISHED):  # taken before its `put` returned
            self.ledger.move(finished.number, Fate.QUEUED)
            self._count(self._whole[finished.number], None)
        self.ledger.move(finished.number, Fate.TAKEN)
        self._measure_queue()
        return finished

    def _grown_stale(self, finished: FinishedGroup) -> bool:
        limit, age = self._budget.max_weight_staleness, self._age(finished.group)
        if limit is None or age is None or age <= limit:
            return False
        self.ledger.move(finished.number, Fate.QUEUED)
        self._reject(finished, STALE)
        return True

    def trained(self, groups: Sequence[FinishedGroup]) -> None:
        """Note that the groups were trained. They are counted and forgotten."""
        for finished in groups:
            self.ledger.move(finished.number, Fate.TRAINED)
            del self._whole[finished.number]
        self.unpublished += len(groups)
        self._notify()

    def published(self) -> None:
        """Note that the engines have the weights of all that was trained."""
        self.unpublished = 0
        self._notify()

    def check(self) -> None:
        """Check that the ledger adds up, and agrees with producer, buffer and stream; see `Ledger.check`."""
        self.ledger.check(
            generating={*self._running, *self._waiting},
            queued=round(self.buffer.metrics()["size"]) + len(self._returned),
            waiting_again=len(self._again),
            drawn=self._stream.drawn,
        )

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Inside the block nothing new starts; what is in flight continues."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            self._notify()

    async def drain(self, task: asyncio.Task[None], timeout_s: float) -> None:
        """Start nothing more, and let what is in flight finish. What is not done in time is cancelled. Afterwards
        nothing runs."""
        self._draining = True
        self._notify()
        with watch.waiting("driver", on=f"{self.in_flight.level:.0f} trajectories to finish"):
            clock = asyncio.get_running_loop().time
            deadline = clock() + timeout_s
            while self._running and not task.done() and clock() < deadline:
                await asyncio.wait({task}, timeout=min(0.05, timeout_s))
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error

    # --- figures ------------------------------------------------------------------------------------------------------

    def stats(self, groups: Sequence[Group]) -> tuple[dict[str, float], Tally]:
        """Metrics of a batch and of everything that was judged since the last call, and the tally that they come
        from."""
        tally, self._tally = self._tally, Tally(group_size=self._budget.group_size)
        counts = {f"async/{name}": float(count) for name, count in self.ledger.counts.items()}
        return {**tally.judged_stats(), **tally.batch_stats(groups), **counts}, tally

    def gauges(self, groups: Sequence[Group]) -> dict[str, float]:
        """Means since the last call, as ``async/…`` metrics, which the clock decides. `groups` are those just
        trained."""
        capacity = self.buffer.metrics()["capacity"]
        in_flight = self.in_flight.mean()
        seconds = sum(row.metadata.get("seconds", 0.0) for group in groups for row in group.trajectories)
        return {
            "async/generate_s": seconds / self._budget.samples,
            "async/in_flight_mean": in_flight,
            "async/engine_idle_fraction": max(0.0, 1.0 - in_flight / self._budget.samples),
            "async/queue_size": self.queue.level,
            "async/queue_fill": self.queue.mean() / capacity,
            "async/blocked_fraction": self.blocked.mean(),
            "async/limited_fraction": self.limited.mean(),
        }

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Any], list[FinishedGroup]]:
        """JSON-compatible state, and the groups that wait to be trained."""
        waiting = [self._whole[finished.number] for finished in self._returned]
        waiting += [held for held in self._whole.values() if held.finished not in self._returned]
        taken = self.ledger.numbers(Fate.TAKEN)
        waiting = [held for held in waiting if held.finished.number not in taken]
        state = {
            "ledger": self.ledger.state(),
            "in_flight": [_order_state(order) for order in self._running.values()],
            "again": [_order_state(order) for order in self._again],
            "finished": {str(held.finished.number): _order_state(held.order) for held in waiting},
        }
        return state, [held.finished for held in waiting]

    def restore(self, state: Mapping[str, Any], groups: Sequence[FinishedGroup]) -> None:
        """Continue from a saved state; to be called before `run`. Groups go into the buffer again, and prompts in
        flight start again."""
        self.ledger.restore(state["ledger"], queued=[finished.number for finished in groups])
        for record in state["in_flight"]:
            self.ledger.put_back()
            self._again.append(replace(self._order(record), again=True))
        self._again.extend(self._order(record) for record in state["again"])
        for finished in groups:
            order = self._order(state["finished"][str(finished.number)])
            self._whole[finished.number] = _Finished(finished, order, ())
            self._waiting.add(finished.number)

    def _order(self, record: Mapping[str, Any]) -> Order:
        return Order(draw=self._stream.draw(record["draw"]), round=record["round"], again=record["again"])

    # --- private ------------------------------------------------------------------------------------------------------

    def _measure_queue(self) -> None:
        self.queue.set(self.buffer.metrics()["size"])

    def _notify(self) -> None:
        self._changed.set()
        watch.progress()

    async def _change(self, on: str) -> None:
        self._changed.clear()
        with watch.waiting("rollout", on=on):
            await self._changed.wait()


def _order_state(order: Order) -> dict[str, Any]:
    return {"draw": order.draw.number, "round": order.round, "again": order.again}
