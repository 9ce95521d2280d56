"""Recorder: the loop tells it what it measured, and it passes that on to files, display and trackers.

Figures that seed and run-file decide and figures that the clock decides go into separate files: see `tracking.run_dir`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from miles_core.contracts.report import Report, Verdict
from miles_core.kinds.tracker import Tracker
from miles_core.tracking import rollouts as rollout_files
from miles_core.tracking.live import Display
from miles_core.tracking.run_dir import RunDir
from miles_core.types import Group, TrainBatch

log = logging.getLogger(__name__)


class Recorder:
    def __init__(
        self, directory: RunDir, display: Display, trackers: Mapping[str, Tracker], *, rollouts_every_steps: int
    ) -> None:
        self._directory = directory
        self._display = display
        self._trackers = dict(trackers)
        self._rollouts_every = rollouts_every_steps
        self._timings: dict[str, float] = {}
        self._step_started = time.monotonic()
        self._held: list[tuple[int, Mapping[str, float]]] | None = []
        """Late scores that came before this process's first step. Trackers get them after it: on a resume, they expect
        the first thing they hear to be the step from which the run goes on. None from then on."""

    # --- during a step ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the step and show it."""
        self._display.phase(name)
        started = time.monotonic()
        try:
            yield
        finally:
            key = f"time/{name}_s"
            self._timings[key] = self._timings.get(key, 0.0) + time.monotonic() - started

    def groups_done(self, accepted: int) -> None:
        self._display.groups_done(accepted)

    def tokens(self, batch: int, sampled: int) -> None:
        """How many tokens the step's batch has, and how many of them were sampled."""
        self._timings["tokens/batch"] = float(batch)
        self._timings["tokens/sampled"] = float(sampled)

    def timings(self, figures: Mapping[str, float]) -> None:
        """Add figures of the step that the clock decides."""
        self._timings.update(figures)

    def contracts(self, step: int, reports: Sequence[Report]) -> None:
        """Show the contracts; a broken one is an event with its offenders."""
        self._display.contracts(reports)
        for report in reports:
            if report.status is Verdict.BROKEN:
                self.event("contract_broken", step=step, contract=report.name, offenders=list(report.offenders))

    def rollouts(self, step: int, groups: Sequence[Group], batch: TrainBatch) -> None:
        if step % self._rollouts_every == 0:
            rollout_files.write(self._directory.rollouts, step, groups, batch)

    # --- the step's line ----------------------------------------------------------------------------------------------

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the step's line and start timing the next."""
        now = time.monotonic()
        timings = {**self._timings, "time/step_s": now - self._step_started}
        if "time/rollout_s" in timings and "tokens/sampled" in timings:
            # Where the rollout never stops, `time/rollout_s` is only the wait for a batch.
            seconds = timings["time/step_s" if "async/generate_s" in timings else "time/rollout_s"]
            timings["throughput/rollout_tokens_per_s"] = timings["tokens/sampled"] / max(seconds, 1e-9)
            timings["throughput/train_tokens_per_s"] = timings["tokens/batch"] / max(timings["time/train_s"], 1e-9)
        self._timings, self._step_started = {}, now
        self._directory.append(self._directory.metrics, {"step": step, **metrics})
        self._directory.append(self._directory.timings, {"step": step, **timings})
        self._display.step(step, metrics, timings)
        self._track(step, {**metrics, **timings})
        self._track_held()

    def evaluated(self, step: int, figures: Mapping[str, float]) -> None:
        """Write a late score under the step whose weights it measured, into a file of its own (evals.jsonl)."""
        self._directory.append(self._directory.evals, {"step": step, **figures})
        self._display.evaluated(step, figures)
        if self._held is None:
            self._track(step, figures)
        else:
            self._held.append((step, figures))

    def _track(self, step: int, figures: Mapping[str, float]) -> None:
        for name, tracker in list(self._trackers.items()):
            with self._tracker(name):
                tracker.record(step, figures)

    def _track_held(self) -> None:
        held, self._held = self._held, None
        for step, figures in held or ():
            self._track(step, figures)

    # --- beside steps -------------------------------------------------------------------------------------------------

    def event(self, kind: str, **facts: Any) -> None:
        self._directory.event(kind, **facts)
        log.info("%s %s", kind, facts)

    def alarm(self, step: int, message: str) -> None:
        """Something a person should look at; the run goes on."""
        self.event("alarm", step=step, message=message)
        self._display.say(message, alarm=True)

    def say(self, message: str) -> None:
        self._display.say(message)

    def close(self) -> None:
        self._track_held()
        for name, tracker in list(self._trackers.items()):
            with self._tracker(name):
                tracker.close()

    @contextlib.contextmanager
    def _tracker(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a dashboard does, the run goes on without it
            self._trackers.pop(name, None)
            log.exception("tracker %s", name)
            self.event("tracker_off", tracker=name, error=f"{type(error).__name__}: {error}")
            self._display.say(f"tracker {name} failed and is switched off: {error}", alarm=True)
