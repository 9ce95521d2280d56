"""The synchronous loop, as it reads.

Order of a step: collect, train, save when due, publish, evaluate when due. Saving comes before publishing, so a
checkpoint of step s holds everything needed to publish version s; a resumed run does just that and records step s
again.
"""

from __future__ import annotations

from miles_core.driver import stages
from miles_core.driver.run import Run
from miles_core.errors import RunError


async def train(run: Run) -> None:
    """Run all remaining steps.

    Raises:
        RunError: there is no step left to do.
    """
    start = run.start_step
    if start >= run.last_step:
        raise RunError(
            "this run would do no work",
            found=f"{start} of {run.last_step} steps are done",
            where=str(run.directory.path),
            do="raise schedule.steps, or start a new name",
        )
    await stages.publish(run, start, first=True)  # engines hold the trainer's weights before the first step
    await stages.finish_step(run, start, run.resumed_metrics)
    for step in range(start + 1, run.last_step + 1):
        metrics = await stages.rollout_and_update(run, step)
        if run.save_due(step):
            await stages.save(run, step, metrics)
        await stages.publish(run, step)
        await stages.finish_step(run, step, metrics)
        if run.stop.requested:
            await stages.save(run, step, metrics)  # does nothing when this step is saved already
            break
