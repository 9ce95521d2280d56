"""All ranks as one trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import ray

from miles_core.errors import MilesError, RunError, TrainerLost
from miles_core.kinds.backend import RouteCounts, StepMetrics
from miles_core.kinds.transport import Sender, SharedSender
from miles_core.types import Float32, TrainBatch, WeightManifest
from miles_core.watch import progress, waiting
from miles_core.weights.digests import merge_manifests
from miles_ray.remote import fetch

GRACE_S = 3.0
"""After one rank failed, how long the others may take to report too; then they are taken to hang in a collective."""
CLOSE_S = 20.0
"""How long a rank may take to close before it is killed."""


class RayTrainer:
    """Calls every rank at once. A rank's failure is raised at once, since the others may wait for it for ever."""

    def __init__(self, actors: Sequence[Any], model_path: str) -> None:
        self.model_path = model_path
        self._actors = list(actors)
        self._broken: str | None = None

    async def log_probs(self, batch: TrainBatch, *, model: Literal["policy", "reference"] = "policy") -> Float32:
        return cast(Float32, (await self._all("log_probs", batch=batch, model=model))[0])

    async def route_counts(self) -> RouteCounts | None:
        return cast("RouteCounts | None", (await self._all("route_counts"))[0])

    async def train_step(self, batch: TrainBatch) -> StepMetrics:
        return cast(StepMetrics, (await self._all("train_step", batch=batch))[0])

    async def save(self, directory: Path) -> None:
        await self._all("save", directory)

    async def load(self, directory: Path) -> None:
        await self._all("load", directory)

    async def save_hf(self, directory: Path) -> None:
        await self._all("save_hf", directory)

    async def offload(self) -> None:
        await self._all("offload")

    async def onload(self) -> None:
        await self._all("onload")

    async def open_sender(self, make: Callable[[], Sender]) -> None:
        ref = self._actors[0].run.remote("open_sender", (make,), {})
        with waiting("driver", on="trainer rank 0: open_sender"):
            await fetch(ref, who="trainer rank 0", died=TrainerLost, failed=RunError, doing="open_sender")

    async def open_senders(self, make: Callable[[int, int], SharedSender]) -> None:
        await self._all("open_senders", make)

    async def send_weights(self, version: int) -> WeightManifest:
        parts = await self._all("send_weights", version)
        return merge_manifests([part for part in parts if part is not None])

    def abandon(self, reason: str) -> None:
        """Take the ranks for hung: later calls say so, and `close` kills them without asking."""
        self._broken = reason

    async def close(self) -> None:
        """Close every rank and end its process. Idempotent; a rank that does not answer is killed."""
        actors, self._actors = self._actors, []
        if not actors:
            return
        if self._broken is None:
            refs = [actor.stop.remote() for actor in actors]
            await asyncio.wait([asyncio.ensure_future(_quiet(ref)) for ref in refs], timeout=CLOSE_S)
        for actor in actors:
            ray.kill(actor)

    async def _all(self, method: str, *args: Any, batch: TrainBatch | None = None, **kwargs: Any) -> list[Any]:
        """Run a method on all ranks and return their results in rank order."""
        if self._broken is not None or not self._actors:
            raise RunError(
                f"the trainer cannot {method}", found=self._broken or "it is closed", do="restart the run with --resume"
            )
        shared = None if batch is None else ray.put(batch)  # once, for all ranks
        tasks = [
            asyncio.create_task(self._one(rank, actor.run.remote(method, args, kwargs, shared), method))
            for rank, actor in enumerate(self._actors)
        ]
        _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            _, pending = await asyncio.wait(tasks, timeout=GRACE_S)
        errors = {rank: task.exception() for rank, task in enumerate(tasks) if task.done() and task.exception()}
        if errors:
            if pending:
                hung = [str(rank) for rank, task in enumerate(tasks) if task in pending]
                self.abandon(f"ranks {', '.join(hung)} wait for a rank that failed in {method}")
                for task in pending:
                    task.cancel()
            raise _first_cause(errors)
        progress()
        return [task.result() for task in tasks]

    @staticmethod
    async def _one(rank: int, ref: Any, method: str) -> Any:
        with waiting("driver", on=f"trainer rank {rank}: {method}"):
            return await fetch(ref, who=f"trainer rank {rank}", died=TrainerLost, failed=RunError, doing=method)


def _first_cause(errors: dict[int, BaseException | None]) -> BaseException:
    """The error to show: a dead process before the lost connections it caused, else the lowest rank's."""
    ordered = sorted(errors.items(), key=lambda item: (not _died(item[1]), item[0]))
    error = ordered[0][1]
    assert error is not None
    for rank, other in ordered[1:]:
        error.add_note(f"rank {rank} failed too: {other.message if isinstance(other, MilesError) else other}")
    return error


def _died(error: BaseException | None) -> bool:
    return isinstance(error, TrainerLost)


async def _quiet(ref: Any) -> None:
    """Await a closing call; how it fails no longer matters, the process is killed next."""
    try:
        await ref
    except ray.exceptions.RayError:
        return
