"""Executor: starts trainer ranks and engines, and gives the driver one object for all ranks and one for each engine."""

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
    """Everything a rank needs. The driver has resolved it: workers import exactly `load` and look for no plugins."""

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
    """Everything an engine needs; see `TrainerSpec`. `EngineContext` explains most fields."""

    load: str
    """``module:Class`` of the engine."""
    options: Any
    """The engine's own validated options model."""
    count: int
    """How many replicas to start."""
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
    """All ranks as one object: the methods of `kinds.backend.Backend`, to be awaited. An error that a rank raises is
    raised here, with the rank in its `where`."""

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
    """Created in the driver as ``Executor(options)``. After `close`, no process that it started is left."""

    async def start_trainer(self, spec: TrainerSpec) -> Trainer: ...
    async def start_engines(self, spec: EngineSpec) -> Sequence[Engine]:
        """Create and start `spec.count` engines. They are ready to generate when this returns.

        Engines are numbered from 0. A later call adds engines, whose numbers follow those of the earlier ones.
        """
        ...

    async def restart_engine(self, index: int) -> Engine:
        """End what is left of an engine and start another one in its place, from the same spec. Its weight version is
        -1.

        Raises:
            EngineError: it did not start.
        """
        ...

    async def describe(self) -> Mapping[str, str]:
        """Where each rank and engine runs, for the run's events and for error messages."""
        ...

    async def close(self) -> None: ...
