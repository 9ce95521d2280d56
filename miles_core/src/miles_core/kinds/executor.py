"""Executor: places trainer ranks and engines, and hands the driver one object for each side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from miles_core.kinds.backend import BackendContext, LossSettings, OptimizerSettings, RouteCounts, StepMetrics
from miles_core.kinds.engine import Engine, EngineContext
from miles_core.kinds.transport import WeightSource
from miles_core.types import Float32, RouteMode, TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """Everything a rank needs, resolved by the driver: workers import exactly `load` and discover nothing."""

    load: str
    """``module:Class`` of the backend."""
    options: Any
    """The backend's own validated options model."""
    world_size: int
    model_path: str
    device: Literal["cpu", "cuda"]
    seed: int
    optimizer: OptimizerSettings
    loss: LossSettings
    reference: bool
    routes: RouteMode = "off"
    true_on_policy: bool = False
    architecture: str | None = None
    """See `BackendContext.architecture`."""

    def context(self, rank: int, *, device: str) -> BackendContext:
        """What the backend of one rank is created with; `device` is ``cpu`` or ``cuda:<index>``."""
        return BackendContext(
            model_path=self.model_path,
            device=device,
            rank=rank,
            world_size=self.world_size,
            seed=self.seed,
            optimizer=self.optimizer,
            loss=self.loss,
            reference=self.reference,
            routes=self.routes,
            true_on_policy=self.true_on_policy,
            architecture=self.architecture,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    load: str
    options: Any
    count: int
    model_path: str
    context_length: int | None
    device: Literal["cpu", "cuda"]
    seed: int
    routes: bool = False
    true_on_policy: bool = False
    log_dir: str | None = None

    def context(self, index: int, *, device: str) -> EngineContext:
        """What engine number `index` is created with; `device` is ``cpu`` or ``cuda:<index>``."""
        return EngineContext(
            model_path=self.model_path,
            context_length=self.context_length,
            device=device,
            seed=self.seed,
            index=index,
            routes=self.routes,
            true_on_policy=self.true_on_policy,
            log_dir=self.log_dir,
        )


class Trainer(WeightSource, Protocol):
    """All ranks as one object; asynchronous. A failing rank's error is raised with its rank in `where`."""

    async def log_probs(self, batch: TrainBatch, *, model: Literal["policy", "reference"] = "policy") -> Float32: ...
    async def route_counts(self) -> RouteCounts | None:
        """Of the latest `log_probs` of the policy."""
        ...

    async def train_step(self, batch: TrainBatch) -> StepMetrics: ...
    async def save(self, directory: Path) -> None: ...
    async def load(self, directory: Path) -> None: ...
    async def save_hf(self, directory: Path) -> None: ...
    async def offload(self) -> None: ...
    async def onload(self) -> None: ...
    async def close(self) -> None: ...


class Executor(Protocol):
    """Created in the driver as ``Executor(options)``; owns every process it starts and leaves none behind after
    `close`."""

    async def start_trainer(self, spec: TrainerSpec) -> Trainer: ...
    async def start_engines(self, spec: EngineSpec) -> Sequence[Engine]:
        """Create `spec.count` engines, each with its `index`, and start them: they are ready to generate on return.

        A later call adds engines: their indices go on where the earlier ones end, and each keeps its own call's spec.
        """
        ...

    async def restart_engine(self, index: int) -> Engine:
        """End what is left of an engine and start a new one in its place; it serves no weights yet (version -1).

        Raises:
            EngineError: it did not start.
        """
        ...

    async def describe(self) -> Mapping[str, str]:
        """Where each rank and engine runs, for env.json and error messages."""
        ...

    async def close(self) -> None: ...
