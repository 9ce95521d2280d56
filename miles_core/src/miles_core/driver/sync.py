"""The synchronous loop: collect a batch, train on it, give the engines the new weights, and again.

A step is: collect, train, save if due, publish, evaluate if due, write the step's line. A step is saved before its
weights are published. So a resumed run begins by publishing them, and then writes that step's line again.
"""

from __future__ import annotations

from miles_core.driver import stages
from miles_core.driver.recovery import attend
from miles_core.driver.run import Run


async def train(run: Run) -> None:
    """Run all remaining steps.

    Raises:
        RunError: there is no step left to do.
    """
    start = stages.first_step(run)
    await stages.publish_first(run)
    await stages.finish_step(run, start, run.resumed_metrics)
    for step in range(start + 1, run.last_step + 1):
        collected = await attend(run, stages.collect_batch(run, step))
        metrics = await stages.learn(run, collected, step, max_staleness=0)
        if run.save_due(step):
            await stages.save(run, step, metrics)
        await stages.publish(run)
        await stages.finish_step(run, step, metrics)
        if run.stop.requested:
            await stages.save(run, step, metrics)  # does nothing when this step is saved already
            break
