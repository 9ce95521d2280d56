"""Engines that are lost, and how they are replaced.

An engine is lost when a request fails with `EngineLost`, when it does not answer in time, or when it serves another
version than the published one. From then on it gets no requests, and those it had continue on other engines. Meanwhile
another engine is started in its place, however long that takes. The new one gets its weights in an update of all
engines, at a moment when the trainer has nothing to do, and serves requests once that update is complete.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from miles_core.driver.run import Run
from miles_core.errors import EngineError, EngineLost, MilesError, RunError, TransportError, trainer_lost
from miles_core.kinds.engine import Engine
from miles_core.restarts import RestartBudget
from miles_core.watch import waiting
from miles_core.weights.lifecycle import PublishReport

T = TypeVar("T")

MAX_ROUNDS = 3
"""How often all engines may fail to start again, with none left that serves, before the run stops."""
REST = 1.0
"""Pause between two attempts to start an engine again while others serve, in durations of the failed attempt."""


async def monitor(run: Run) -> None:
    """Ask every serving engine for its version, at intervals, until cancelled."""
    interval_s, timeout_s = run.spec.rollout.health_interval_s, run.spec.rollout.health_timeout_s
    while True:
        await asyncio.sleep(interval_s)
        await asyncio.gather(*(probe(run, index, timeout_s) for index in sorted(run.pool.serving())))


async def probe(run: Run, index: int, timeout_s: float) -> None:
    """Give an engine up as lost if it does not answer, or does not serve the published version."""
    before, engine = run.version, run.engines[index]
    if run.publishing:
        return  # an update has its own time-outs, and checks the versions itself
    try:
        async with asyncio.timeout(timeout_s):
            version = await engine.version()
    except TimeoutError:
        why = f"the engine did not answer within {timeout_s:g} s"
    except MilesError as error:
        why = error.message
    else:
        if run.publishing or run.version != before or version == before:
            return
        why = f"the engine serves version {version}, published is {before}"
    if run.engines[index] is engine:  # not if it was replaced while we waited for its answer
        lose(run, index, why)


def lose(run: Run, index: int, why: str) -> None:
    """Take an engine out of service."""
    if index in run.pool.serving():
        run.pool.lose(index, why)


async def attend(run: Run, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, during which the trainer has nothing to do, and replace engines that are lost meanwhile."""
    task = asyncio.create_task(work)
    try:
        while not task.done():
            losing = asyncio.create_task(_due(run))
            try:
                await asyncio.wait({task, losing}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                losing.cancel()
            if not task.done():
                await recover(run)
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _due(run: Run) -> None:
    """Start lost engines again. Return as soon as one attempt has ended, or no engine serves."""
    while True:
        await run.pool.loss()
        _begin(run)
        if not run.pool.serving() or any(attempt.done() for attempt in run.restarts.values()):
            return
        pause_s = run.spec.rollout.health_interval_s
        if run.restarts:
            await asyncio.wait(run.restarts.values(), timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(pause_s)


def _begin(run: Run) -> None:
    """Start lost engines again, each in a task of its own. While others serve, one whose last attempt has just failed
    waits a little. One that was replaced too often waits in any case."""
    now, patient = time.monotonic(), bool(run.pool.serving() or run.restarts)
    for index, why in run.pool.lost().items():
        resting = run.not_before.get(index, now) > now
        if index in run.restarts or (patient and resting):
            continue
        budget = _budget(run, index)
        if wait_s := budget.wait_s():
            if not resting:
                run.not_before[index] = now + wait_s
                text = f"engine {index} is lost too often to be replaced ({budget}): {why}"
                run.recorder.alarm(run.trained_step, text)
            continue
        run.recorder.alarm(run.trained_step, f"engine {index} is lost and will be replaced: {why}")
        run.fleet.leave(run.engines[index])
        run.restarts[index] = asyncio.create_task(_start_again(run, index), name=f"engine {index} again")


def _budget(run: Run, index: int) -> RestartBudget:
    rollout = run.spec.rollout
    fresh = RestartBudget(rollout.engine_restarts, rollout.engine_restarts_within_s)
    return run.replaced.setdefault(index, fresh)


async def _start_again(run: Run, index: int) -> Engine:
    began = time.monotonic()
    try:
        with waiting(f"engine {index}", on="its new process"):
            return await run.executor.restart_engine(index)
    except MilesError:
        now = time.monotonic()
        run.not_before[index] = now + max(REST * (now - began), run.spec.rollout.health_interval_s)
        raise


async def end_restarts(run: Run) -> None:
    """Give up all attempts to start engines again."""
    attempts, run.restarts = list(run.restarts.values()), {}
    for attempt in attempts:
        attempt.cancel()
    await asyncio.gather(*attempts, return_exceptions=True)


async def recover(run: Run) -> None:
    """Publish to engines that have started in the places of lost ones. The trainer must have nothing to do.

    What is published is the same version again, or the next one if the trainer has moved on. This waits for engines to
    start only if none serves.

    Raises:
        RunError: no engine serves, after several attempts or because all were replaced too often.
    """
    rounds = 0
    while rounds < MAX_ROUNDS:
        newcomers = await replace_lost(run)
        if newcomers:
            try:
                await update(run, run.version if run.trained_step == run.published_step else run.version + 1)
            except (EngineError, TransportError) as error:
                message = f"the weights did not reach a replaced engine: {error.message}"
                run.recorder.alarm(run.trained_step, message)
            await admit(run, newcomers)
        if run.pool.serving():
            return  # engines that are still starting join at a later update
        rounds += not run.restarts
    raise RunError(
        "every engine is lost and none could be replaced",
        expected="at least one engine that starts and takes the weights",
        found="; ".join(f"engine {index}: {why}" for index, why in run.pool.lost().items()),
        where="engines",
        do="look at their logs, then continue with --resume; see rollout.engine_restarts",
    )


async def replace_lost(run: Run) -> set[int]:
    """Let engines that have started in the places of lost ones take part in the next update; their numbers."""
    _begin(run)
    if run.restarts and not run.pool.serving():
        with waiting("driver", on="an engine to start again: all are lost"):
            await asyncio.wait(run.restarts.values(), return_when=asyncio.FIRST_COMPLETED)
    newcomers = set()
    for index in [index for index, attempt in run.restarts.items() if attempt.done()]:
        try:
            engine = run.restarts.pop(index).result()
        except MilesError as error:
            run.recorder.alarm(run.trained_step, f"engine {index} could not be replaced: {error.message}")
            continue
        run.not_before.pop(index, None)
        run.engines[index] = engine
        run.fleet.join(engine)
        newcomers.add(index)
    return newcomers


async def admit(run: Run, newcomers: set[int]) -> None:
    """Let those newcomers serve that hold the published version."""
    if newcomers:
        run.recorder.event("placed", **await run.executor.describe())
    for index in sorted(newcomers):
        engine = run.engines[index]
        if engine not in run.fleet.members:
            continue  # it was lost again, and will be replaced again
        if (why := await _unfit(engine, run.version, run.spec.rollout.health_timeout_s)) is None:
            run.pool.restore(index, engine)
            _budget(run, index).count()
            run.recorder.event("engine_replaced", engine=index, version=run.version)
        else:
            run.fleet.leave(engine)
            run.recorder.alarm(run.trained_step, f"engine {index} started again and serves nobody: {why}")


async def _unfit(engine: Engine, version: int, timeout_s: float) -> str | None:
    """Why an engine cannot serve `version` now, or None."""
    try:
        async with asyncio.timeout(timeout_s):
            found = await engine.version()
    except TimeoutError:
        return f"it did not answer within {timeout_s:g} s"
    except MilesError as error:
        return error.message
    return None if found == version else f"it holds version {found}, published is {version}"


async def publish(run: Run, version: int) -> PublishReport | None:
    """Publish the trainer's weights to all engines, newcomers included. If none is left to take them, wait for one that
    starts in the place of a lost one; then there is no report.

    Raises:
        MilesError: see `update`.
        RunError: see `recover`.
    """
    newcomers = await replace_lost(run)
    try:
        report = await update(run, version)
    except (EngineError, TransportError) as error:
        if run.pool.serving():
            raise
        run.recorder.alarm(run.trained_step, f"no engine took version {version}: {error.message}")
        await recover(run)
        return None
    await admit(run, newcomers)
    return report


async def update(run: Run, version: int) -> PublishReport:
    """Publish through the fleet. If engines make it fail, they are given up as lost and the rest get the version.

    Raises:
        MilesError: the update failed although all engines answer, or none is left.
    """
    mode, timeout_s = run.spec.schedule.on_weight_update, run.spec.rollout.health_timeout_s
    run.publishing = True
    try:
        await _leave_dead(run, timeout_s)  # an engine that hangs costs less time here than in the middle of an update
        for _ in range(len(run.engines)):
            try:
                report = await run.fleet.publish(version, mode=mode)
                note_published(run, version, report)
                return report
            except MilesError as error:
                if (lost := trainer_lost(error)) is not None:
                    raise lost from error
                if not await _leave_dead(run, timeout_s):
                    raise
        raise EngineLost("no engine is left to publish to", where="engines")
    finally:
        run.publishing = False


def note_published(run: Run, version: int, report: PublishReport) -> None:
    """Remember, and record as an event, that every engine now serves the trainer's weights as `version`."""
    run.version, run.published_step = version, run.trained_step
    facts = {"tensors": report.num_tensors, "bytes": report.num_bytes}
    run.recorder.event("publish", version=version, step=run.published_step, **facts)


async def _leave_dead(run: Run, timeout_s: float) -> bool:
    """Give up engines that no longer answer, newcomers of the last update included. Returns whether there were any and
    others remain, so that trying again makes sense."""
    dead = []
    for index, engine in enumerate(run.engines):
        if engine not in run.fleet.asked:
            continue
        try:
            async with asyncio.timeout(timeout_s):
                await engine.version()
        except (MilesError, TimeoutError) as error:
            dead.append(index)
            run.fleet.leave(engine)
            lose(run, index, error.message if isinstance(error, MilesError) else "the engine does not answer")
    return bool(dead) and bool(run.fleet.members)
