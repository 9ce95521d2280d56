"""Fully asynchronous: the rollout never stops, and the trainer takes whole groups from a buffer.

There are two tasks. The producer (`rollout.producer`) keeps a number of trajectories in flight. The loop below takes a
batch, trains, saves, publishes, evaluates. Since only the loop publishes, the published version does not change between
the moment a group is taken from the buffer and the moment it is trained: it is never older than it was judged to be.

On the first Ctrl-C the loop ends with the step in progress, or at once if it waits for a batch. No new group starts.
Those in flight get `schedule.drain_s` to finish, and the checkpoint keeps finished groups and the prompts of the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from miles_core.driver import stages
from miles_core.driver.recovery import attend
from miles_core.driver.run import Run
from miles_core.kinds.data_buffer import FinishedGroup
from miles_core.rollout import group_file
from miles_core.rollout.budget import Budget
from miles_core.rollout.producer import Producer
from miles_core.rollout.scheduler import Collected, first_error
from miles_core.watch import waiting


async def train(run: Run) -> None:
    """Run all remaining steps; see `driver.sync.train` for the order of saving, publishing and evaluating."""
    start = stages.first_step(run)
    producer = make_producer(run)
    run.pending = partial(_remember, producer)
    await stages.publish_first(run)
    await stages.finish_step(run, start, run.resumed_metrics)
    try:
        async with asyncio.TaskGroup() as tasks:  # an error in the producer ends the loop too
            producing = tasks.create_task(producer.run(), name="producer")
            step, metrics = await _train(run, producer, start)
            run.recorder.say(f"letting {producer.in_flight.level:.0f} trajectories in flight finish")
            await producer.drain(producing, run.spec.schedule.drain_s if run.stop.requested else 0.0)
    except BaseExceptionGroup as several:
        raise (error := first_error(several)) from error.__cause__
    producer.check()
    if run.stop.requested:
        run.saved_step = None  # save once more: the checkpoint must hold the groups that the drain finished
    await stages.save(run, step, metrics)
    run.recorder.event("ledger", step=step, **producer.ledger.counts)


def make_producer(run: Run) -> Producer:
    """The producer of a run, with the groups and prompts that its checkpoint holds."""
    schedule = run.spec.schedule
    budget = Budget(
        groups_per_step=schedule.groups_per_step,
        group_size=schedule.group_size,
        samples=run.spec.max_in_flight,
        refill=schedule.refill,
        unused=schedule.unused_groups,
        max_weight_staleness=schedule.max_weight_staleness,
        update_interval=schedule.update_weights_interval,
    )
    producer = Producer(
        stream=run.stream,
        episodes=run.episodes,
        spec=run.spec.rollout,
        filters=run.filters,
        budget=budget,
        make_buffer=run.make_buffer,
        version=lambda: run.version,
    )
    # Publishing at the start is an extra update; the next one comes when it would have come without it.
    producer.unpublished = run.start_step % schedule.update_weights_interval * schedule.groups_per_step
    if run.resumed is not None and "pending" in run.resumed.state:
        groups = group_file.read(run.resumed.groups_dir, run.stream.prompt)
        producer.restore(run.resumed.state["pending"], groups)
    return producer


async def _train(run: Run, producer: Producer, start: int) -> tuple[int, dict[str, float]]:
    """Run steps until the last one, or until the run is asked to stop. Returns the last step done and its metrics."""
    metrics = dict(run.resumed_metrics)
    for step in range(start + 1, run.last_step + 1):
        began = time.monotonic()
        producer.step = step
        taken = await _take(run, producer)
        if taken is None:
            return step - 1, metrics
        waited = time.monotonic() - began
        collected = _collected(run, producer, taken, step)
        metrics = await stages.learn(run, collected, step, max_staleness=run.spec.schedule.max_weight_staleness)
        producer.trained(taken)
        producer.check()
        if run.save_due(step):
            await stages.save(run, step, metrics)
        if stages.publish_due(run, step):
            await stages.publish(run)
            producer.published()
        idle = waited / max(time.monotonic() - began, 1e-9)
        run.recorder.timings({**producer.gauges(collected.groups), "async/trainer_idle_fraction": idle})
        # Evaluation on the engines that also roll out: no new group starts until it has ended.
        async with producer.held() if run.eval_here(step) else contextlib.nullcontext():
            await stages.finish_step(run, step, metrics)
        if run.stop.requested:
            return step, metrics
    return run.last_step, metrics


async def _take(run: Run, producer: Producer) -> list[FinishedGroup] | None:
    """The next batch, or None if the run was asked to stop before it was complete."""
    taking = asyncio.create_task(producer.take(run.spec.schedule.groups_per_step, run.recorder.groups_done))
    stopping = asyncio.create_task(run.stop.wait())
    try:
        with run.recorder.phase("rollout"), waiting("driver", on=f"a batch for step {producer.step}"):
            await attend(run, _either(taking, stopping))
        return taking.result() if taking.done() else None
    finally:
        for task in (taking, stopping):
            task.cancel()
        await asyncio.wait({taking, stopping})


async def _either(*tasks: asyncio.Task[Any]) -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


def _collected(run: Run, producer: Producer, taken: Sequence[FinishedGroup], step: int) -> Collected:
    groups = tuple(finished.group for finished in taken)
    stats, tally = producer.stats(groups)
    collected = Collected(
        groups=groups, stats=stats, wasted={}, rewards=tuple(tally.rewards), failures=tally.last_failures()
    )
    stages.report_rollout(run, collected, step)
    return collected


def _remember(producer: Producer) -> Any:
    state, groups = producer.state()
    return state, partial(group_file.write, groups=groups)
