"""`miles train`: takes a validated run-file to a finished run. Opens the run directory, runs the loop, and ends it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from miles_core import plan as plans
from miles_core.config.load import Source
from miles_core.config.resolve import ResolvedRun
from miles_core.config.spec import dump
from miles_core.driver import fully_async, one_step_off, recovery, sync
from miles_core.driver.assemble import open_run
from miles_core.driver.environment import describe_environment
from miles_core.driver.identity import check_same_run
from miles_core.driver.recorder import Recorder
from miles_core.driver.run import Run
from miles_core.driver.signals import stop_on_signals
from miles_core.errors import MilesError, RunError, TrainerLost
from miles_core.kinds.tracker import Tracker
from miles_core.registry import Registry, load_target
from miles_core.report.html import summary, write_report
from miles_core.report.load import load_run
from miles_core.restarts import RestartBudget
from miles_core.tracking.live import Display
from miles_core.tracking.run_dir import RunDir
from miles_core.watch import watchdog

log = logging.getLogger(__name__)

LOOPS = {"sync": sync.train, "one-step-off": one_step_off.train, "fully-async": fully_async.train}
"""The loop of each `schedule.mode`."""
INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def train(
    source: Source,
    resolved: ResolvedRun,
    registry: Registry,
    plan: plans.Plan,
    display: Display,
    *,
    resume: bool,
    fresh: bool,
) -> int:
    """Run to the end and return the exit code.

    Raises:
        MilesError: what stopped the run; the run directory has it as an event too.
    """
    directory = RunDir(Path(resolved.spec.tracking.dir) / resolved.spec.name)
    _claim(directory, resolved, resume=resume, fresh=fresh, say=display.say)
    try:
        directory.write_text("run.yaml", dump(resolved.spec))
        directory.write_text("run.source.yaml", source.as_given())
        directory.write_text("plan.json", json.dumps(plan.as_json(), indent=1) + "\n")
        directory.write_text("env.json", json.dumps(describe_environment(registry), indent=1) + "\n")
        with _log_file(directory.logs / "driver-0.log"):
            return _run(resolved, registry, directory, display, resume=resume)
    finally:
        directory.close()


def _claim(directory: RunDir, resolved: ResolvedRun, *, resume: bool, fresh: bool, say: Callable[[str], None]) -> None:
    """Take the run directory for this process, or refuse if it holds an earlier run that this one does not resume."""
    if directory.exists() and not resume and not fresh:
        raise RunError(
            "this run directory holds a run already",
            found=str(directory.path / "run.yaml"),
            where=str(directory.path),
            do="continue it with --resume, keep it aside with --fresh, or give this run another `name`",
        )
    if resume and not directory.exists():
        raise RunError(
            "there is no run to resume", where=str(directory.path), do="start it without --resume, or correct `name`"
        )
    directory.open()
    if resume:
        if changed := check_same_run(directory, resolved.spec):
            say(f"resumed with other values of {', '.join(changed)}")
    elif directory.exists():
        directory.close()
        say(f"the earlier run is kept as {directory.set_aside()}")
        directory.open()


def _run(resolved: ResolvedRun, registry: Registry, directory: RunDir, display: Display, *, resume: bool) -> int:
    spec = resolved.spec
    recorder = Recorder(
        directory,
        display,
        _trackers(resolved, directory),
        rollouts_every_steps=spec.tracking.rollouts_every_steps,
    )
    recorder.event("start", name=spec.name, resume=resume)
    display.start()
    try:
        outcome = _outcome(resolved, registry, directory, recorder, display, resume=resume)
    except Exception as error:
        for line in _report(directory):  # below the error, which is what one wants to read first
            error.add_note(line)
        raise
    for line in _report(directory):
        display.say(line)
    return 0 if outcome == "finished" else INTERRUPTED


def _outcome(
    resolved: ResolvedRun,
    registry: Registry,
    directory: RunDir,
    recorder: Recorder,
    display: Display,
    *,
    resume: bool,
) -> str:
    """Run to the end, which is the last event, and say how it ended."""
    outcome = "failed"
    try:
        outcome = asyncio.run(_main(resolved, registry, directory, recorder, display, resume=resume))
    except (KeyboardInterrupt, asyncio.CancelledError):
        outcome = "interrupted"
    except MilesError as error:
        recorder.event("error", type=type(error).__name__, message=str(error))
        raise
    except Exception as error:
        log.exception("the run failed")
        recorder.event("error", type=type(error).__name__, message=str(error))
        raise
    finally:
        with suppress(MilesError):  # a full disk must not hide what stopped the run
            recorder.event("stop", outcome=outcome)
        recorder.close()
        display.stop()
    return outcome


async def _main(
    resolved: ResolvedRun,
    registry: Registry,
    directory: RunDir,
    recorder: Recorder,
    display: Display,
    *,
    resume: bool,
) -> str:
    main = asyncio.current_task()
    assert main is not None

    def stalled(chain: str) -> None:
        recorder.event("stall", waiters=chain.splitlines())
        display.say(chain, alarm=True)

    with stop_on_signals(main, display.say) as stop:
        guard = asyncio.create_task(watchdog(resolved.spec.stall_s, stalled))
        try:
            restarts = RestartBudget(resolved.spec.checkpoint.restarts, resolved.spec.checkpoint.restarts_within_s)
            while True:
                try:
                    async with open_run(
                        resolved, registry, directory, recorder, stop, resume=resume or restarts.total > 0
                    ) as run:
                        await _watched(run, _loop(run))
                        return "stopped" if stop.requested and run.saved_step != run.last_step else "finished"
                except TrainerLost as error:
                    if restarts.wait_s() or stop.requested:
                        raise
                    restarts.count()
                    recorder.event("restart", reason=error.message, where=error.where)
                    display.say(f"{error.message}; going back to the last checkpoint", alarm=True)
        finally:
            guard.cancel()


async def _loop(run: Run) -> None:
    """Run the loop, then wait for open evaluations. A run that was stopped leaves them to its `--resume`.
    One that was done already, but killed perhaps before it had written its report, has only that to do."""
    if run.complete:
        done = f"{run.start_step} of {run.last_step} steps are done; nothing is left to train."
        run.recorder.say(f"{done} To go on, raise schedule.steps.")
        return
    await LOOPS[run.spec.schedule.mode](run)
    if run.late is not None and not (run.stop.requested and run.saved_step != run.last_step):
        await run.late.drain()


async def _watched(run: Run, loop: Coroutine[Any, Any, None]) -> None:
    """Run the loop, and meanwhile watch whether its engines answer."""
    monitor = asyncio.create_task(recovery.monitor(run), name="engine monitor")
    main = asyncio.create_task(loop, name="loop")
    try:
        await asyncio.wait({main, monitor}, return_when=asyncio.FIRST_COMPLETED)
        if monitor.done():
            monitor.result()  # it ends by an error only
        main.result()
    finally:
        for task in (main, monitor):
            task.cancel()
        await asyncio.wait({main, monitor})


def _trackers(resolved: ResolvedRun, directory: RunDir) -> dict[str, Tracker]:
    config = resolved.spec.model_dump(mode="json")
    return {
        pick.capability.name: load_target(pick.capability.load)(
            pick.options, directory.path, resolved.spec.name, config
        )
        for pick in resolved.many.get("tracker", ())
    }


def _report(directory: RunDir) -> list[str]:
    """Write report.html, also after a failed run, and say what is in it. Of a run without a line of metrics it would
    say nothing. If that fails, it must not hide how the run itself ended."""
    try:
        record = load_run(directory.path)
        return [*summary(record), f"report: {write_report(directory.path)}"] if record.metrics else []
    except Exception as error:
        log.exception("no report")
        return [f"no report: {error}"]


@contextmanager
def _log_file(path: Path) -> Iterator[None]:
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        handler.close()
