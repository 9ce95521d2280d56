"""One step off: the next batch is collected while this one is trained, so every batch is one version old.

Engines get new weights between two collections, never during one. Therefore equal seeds give equal steps, as in the
synchronous loop. A checkpoint includes the batch that was collected and waits to be trained.
"""

from __future__ import annotations

import asyncio

from miles_core.driver import stages
from miles_core.driver.recovery import attend
from miles_core.driver.run import Pending, Run
from miles_core.kinds.data_buffer import FinishedGroup
from miles_core.rollout import group_file
from miles_core.rollout.scheduler import Collected, first_error

MAX_STALENESS = 1
"""Between the collection of a batch and its training, one version at most is published."""


async def train(run: Run) -> None:
    """Run all remaining steps; see `driver.sync.train` for the order of saving, publishing and evaluating."""
    start = stages.first_step(run)
    await stages.publish_first(run)
    await stages.finish_step(run, start, run.resumed_metrics)
    if start == run.last_step:
        return  # this run resumed after the last step's training; only its publishing and its line were missing
    restored = _restore(run)
    ready = await attend(run, stages.collect_batch(run, start + 1)) if restored is None else restored
    for step in range(start + 1, run.last_step + 1):
        metrics, following = await _overlap(run, ready, step)
        run.pending = None if following is None else _remember(following)
        if run.save_due(step):
            await stages.save(run, step, metrics)
        if stages.publish_due(run, step):
            await stages.publish(run)
        await stages.finish_step(run, step, metrics)
        if run.stop.requested or following is None:
            await stages.save(run, step, metrics)  # does nothing when this step is saved already
            break
        ready = following


async def _overlap(run: Run, batch: Collected, step: int) -> tuple[dict[str, float], Collected | None]:
    """Train on a batch and collect the next one at the same time. Both are complete when this returns."""
    following: asyncio.Task[Collected] | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            if step < run.last_step:
                following = tasks.create_task(stages.collect_batch(run, step + 1))
            metrics = await stages.learn(run, batch, step, max_staleness=MAX_STALENESS)
            if following is not None:
                with run.recorder.phase("wait"):
                    await attend(run, asyncio.wait({following}))
    except BaseExceptionGroup as several:
        raise (error := first_error(several)) from error.__cause__
    return metrics, None if following is None else following.result()


def _remember(ready: Collected) -> Pending:
    """How to save a batch that waits to be trained; see `Run.pending`."""
    numbered = [FinishedGroup(number=number, group=group) for number, group in enumerate(ready.groups)]
    facts = {name: getattr(ready, name) for name in ("stats", "wasted", "rewards", "failures")}
    return lambda: (facts, lambda folder: group_file.write(folder, numbered))


def _restore(run: Run) -> Collected | None:
    if run.resumed is None or "pending" not in run.resumed.state:
        return None
    groups = group_file.read(run.resumed.groups_dir, run.stream.prompt)
    facts = dict(run.resumed.state["pending"])
    return Collected(**{**facts, "groups": tuple(f.group for f in groups), "rewards": tuple(facts["rewards"])})
