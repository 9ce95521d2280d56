"""Scores snapshots on engines that do nothing else.

Before anything is sampled, every engine loads the snapshot, proves its live weights against the files, and says which
version it serves. Afterwards each is asked again, and every token that was scored carries the version that sampled it.
If anything goes wrong, all these engines are started again, and the evaluation is repeated once from its first prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from miles_core.config.spec import RunSpec
from miles_core.driver.late_eval import EvalSkipped
from miles_core.errors import ContractError, EngineLost, MilesError
from miles_core.kinds.engine import Engine
from miles_core.kinds.executor import Executor
from miles_core.rollout.episode import Episodes
from miles_core.rollout.evaluate import evaluate
from miles_core.session.pool import EnginePool
from miles_core.types import Prompt
from miles_core.watch import waiting
from miles_core.weights.lifecycle import UpdateSettings, publish
from miles_core.weights.snapshot import SnapshotTransport

TRIES = 2


@dataclass(slots=True, kw_only=True)
class FleetScorer:
    """A `late_eval.Scorer` with engines of its own."""

    spec: RunSpec
    executor: Executor
    engines: list[Engine]
    first_index: int
    """The number of the first of these engines among all engines of the executor."""
    pool: EnginePool
    """The same engines, as `episodes` uses them."""
    episodes: Episodes
    prompts: Sequence[Prompt]
    settings: UpdateSettings
    fresh: bool = True
    """Whether no evaluation has failed since the engines started."""

    async def score(self, step: int, folder: Path) -> dict[str, float]:
        """See `Scorer.score`. The reason is that of the last failure: not_loaded, wrong_version, engine_lost or
        failed."""
        for tries_left in reversed(range(TRIES)):
            try:
                if not self.fresh:
                    await self._renew()
                self.fresh = False  # also where this is cancelled half-way
                figures = await self._attempt(step, folder)
                self.fresh = True
                return figures
            except EvalSkipped:
                if not tries_left:
                    raise
        raise AssertionError("the loop above ends by returning or raising")

    async def _attempt(self, step: int, folder: Path) -> dict[str, float]:
        transport = SnapshotTransport(folder.parent)
        try:
            await transport.open(None, self.engines)
            await publish(transport, self.engines, step, self.settings)
        except MilesError as error:
            raise EvalSkipped("not_loaded", str(error)) from error
        await self._verify(step)
        work = evaluate(
            step,
            prompts=self.prompts,
            episodes=self.episodes,
            spec=self.spec.eval,
            retries=self.spec.rollout.retries,
            max_concurrent=self.spec.max_in_flight,
            version=step,
        )
        try:
            figures = await self._until_loss(asyncio.create_task(work))
        except EngineLost as error:
            raise EvalSkipped("engine_lost", str(error)) from error
        except ContractError as error:
            raise EvalSkipped("wrong_version", str(error)) from error
        except MilesError as error:
            raise EvalSkipped("failed", str(error)) from error
        await self._verify(step)
        return figures

    async def _verify(self, step: int) -> None:
        """Check that every engine serves the weights of `step`."""
        try:
            async with asyncio.timeout(self.spec.rollout.health_timeout_s):
                versions = await asyncio.gather(*(engine.version() for engine in self.engines))
        except (MilesError, TimeoutError) as error:
            raise EvalSkipped("engine_lost", f"an engine does not say which version it serves: {error}") from error
        if wrong := sorted(set(versions) - {step}):
            raise EvalSkipped("wrong_version", f"engines serve {wrong}, expected {step}")

    async def _until_loss(self, work: asyncio.Task[dict[str, float]]) -> dict[str, float]:
        losing = asyncio.create_task(self.pool.loss())
        try:
            await asyncio.wait({work, losing}, return_when=asyncio.FIRST_COMPLETED)
            if lost := self.pool.lost():
                raise EngineLost("; ".join(f"engine {i + self.first_index}: {why}" for i, why in lost.items()))
            return work.result()
        finally:
            for task in (work, losing):
                task.cancel()
            await asyncio.wait({work, losing})

    async def _renew(self) -> None:
        """Start every engine of the fleet again. They have no version then."""
        for position in range(len(self.engines)):
            index = self.first_index + position
            try:
                with waiting("evaluation", on=f"engine {index} to start again"):
                    self.engines[position] = await self.executor.restart_engine(index)
            except MilesError as error:
                raise EvalSkipped("engine_lost", f"engine {index} does not start again: {error}") from error
            self.pool.restore(position, self.engines[position])
