"""Evaluation beside training: a snapshot of a step's weights is scored while later steps are trained.

A score arrives late, and is written into evals.jsonl under the step whose weights it measured. So metrics.jsonl keeps
one line for each step, in order, and depends only on run-file and seed. Evaluations run one after the other, in the
order of their steps. If one fails, it is skipped, counted and reported; it never ends training. A snapshot stays on
disk until its evaluation is over, so a run that was killed or stopped continues its open evaluations when it is
resumed.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Protocol

from miles_core.config.spec import EvalSpec
from miles_core.driver.recorder import Recorder
from miles_core.errors import MilesError, trainer_lost
from miles_core.watch import progress, waiting
from miles_core.weights import snapshot

log = logging.getLogger(__name__)
Export = Callable[[Path], Awaitable[None]]
"""`Trainer.save_hf`."""


class EvalSkipped(Exception):
    """There is no score of this step; says why.

    Args:
        reason: One word, for ``eval/skipped/{reason}``.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Scorer(Protocol):
    """Measures a snapshot."""

    async def score(self, step: int, folder: Path) -> dict[str, float]:
        """Return metrics under ``eval/``. Raises `EvalSkipped`."""
        ...


class LateEvaluations:
    """See the module.

    Args:
        root: Folder of the snapshots.
        now: Returns the step whose weights the trainer holds.
    """

    def __init__(
        self, spec: EvalSpec, root: Path, scorer: Scorer, recorder: Recorder, *, now: Callable[[], int]
    ) -> None:
        self._spec, self._root, self._scorer, self._recorder, self._now = spec, root, scorer, recorder, now
        self._turn = asyncio.Lock()
        self._open: deque[asyncio.Task[None]] = deque()
        self.skipped: Counter[str] = Counter()

    def take_up(self, before: int, *, scored: Collection[int] = ()) -> None:
        """Evaluate the snapshots that an earlier process left of steps before `before`. Later ones are deleted, since
        they will be made again.

        Args:
            scored: Steps whose score is written already: that process ended before it could remove the snapshot.
        """
        for folder in sorted(self._root.glob("step_*")):
            step = snapshot.step_of(folder)
            if step is None or step >= before or step in scored:
                shutil.rmtree(folder)
            else:
                self._start(step, folder)

    async def submit(self, step: int, export: Export, *, final: bool) -> None:
        """Take a snapshot of `step`, the weights the trainer holds, and evaluate it beside what follows.

        Args:
            final: Whether this is the last evaluation, which is never skipped because others are open.

        Raises:
            TrainerLost: a rank was lost during the export. Any other failure of it is a skip.
        """
        self._forget_done()
        while len(self._open) >= self._spec.max_in_flight:
            if self._spec.overflow == "skip" and not final:
                self._skip(step, "busy", f"{len(self._open)} evaluations are under way or wait")
                return
            with waiting("driver", on="the oldest evaluation to end"):
                await asyncio.wait({self._open[0]})
            self._forget_done()
        try:
            with waiting("driver", on=f"the snapshot of step {step}"):
                folder = await snapshot.write(self._root, step, export)
        except (MilesError, OSError) as error:
            if (lost := trainer_lost(error)) is not None:
                raise lost from error
            await asyncio.to_thread(shutil.rmtree, snapshot.folder_of(self._root, step), ignore_errors=True)
            self._skip(step, "export_failed", str(error))
            return
        progress()
        self._start(step, folder)

    async def drain(self) -> None:
        """Wait for every evaluation that was begun."""
        while self._open:
            with waiting("driver", on="the last evaluations to end"):
                await asyncio.wait({self._open[0]})
            self._forget_done()

    async def close(self) -> None:
        """Cancel the open evaluations. Their snapshots stay for `take_up`."""
        open_tasks, self._open = list(self._open), deque()
        for task in open_tasks:
            task.cancel()
        await asyncio.gather(*open_tasks, return_exceptions=True)

    def _start(self, step: int, folder: Path) -> None:
        self._recorder.event("snapshot", step=step, path=str(folder))
        self._open.append(asyncio.create_task(self._evaluate(step, folder, time.monotonic()), name=f"eval {step}"))

    def _forget_done(self) -> None:
        while self._open and self._open[0].done():
            self._open.popleft().result()  # raises where the score could not be written

    async def _evaluate(self, step: int, folder: Path, taken: float) -> None:
        try:
            async with self._turn, asyncio.timeout(self._spec.timeout_s):
                figures = await self._scorer.score(step, folder)
        except EvalSkipped as error:
            self._skip(step, error.reason, str(error))
        except TimeoutError:
            self._skip(step, "timeout", f"it passed its deadline of {self._spec.timeout_s:g} s")
        except Exception as error:  # the boundary: evaluation is nothing that training depends on
            log.exception("evaluation of step %d", step)
            self._skip(step, "crashed", f"{type(error).__name__}: {error}")
        else:
            late = {"eval/latency_s": time.monotonic() - taken, "eval/lag_steps": float(self._now() - step)}
            self._recorder.evaluated(step, {**figures, **late})
            self._recorder.event("eval", step=step, reward=figures["eval/reward_mean"], **late)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        progress()

    def _skip(self, step: int, reason: str, message: str) -> None:
        self.skipped[reason] += 1
        self._recorder.evaluated(step, {f"eval/skipped/{reason}": 1.0})
        self._recorder.event("eval_skipped", step=step, reason=reason, so_far=self.skipped[reason])
        self._recorder.alarm(step, f"the evaluation of step {step} is skipped ({reason}): {message}")
