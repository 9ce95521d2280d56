"""Executor `inprocess`: one trainer rank and all engines in the driver's process.

The synchronous backend lives in one dedicated thread: the event loop stays live while it computes, and what torch keeps
per thread (grad mode, autocast, thread counts) is the same in every call.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, cast

from miles_core.errors import ConfigError, EngineError, RunError
from miles_core.executors.rank import RankHost, device_of, located
from miles_core.kinds.backend import RouteCounts, StepMetrics
from miles_core.kinds.engine import Engine
from miles_core.kinds.executor import EngineSpec, TrainerSpec
from miles_core.kinds.transport import Sender, SharedSender
from miles_core.registry import load_target
from miles_core.types import Float32, TrainBatch, WeightManifest
from miles_core.watch import progress, waiting

RESTART_CLOSE_S = 20.0
"""How long an engine that is replaced may take to close."""


class InProcessTrainer:
    """The single rank behind the trainer's asynchronous face; calls run one after the other in its thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer-0")
        self._host: RankHost | None = None
        self._closed = False
        self.model_path = ""

    async def start(self, spec: TrainerSpec) -> None:
        self.model_path = spec.model_path

        def make() -> RankHost:
            require_cuda(spec.device)
            return RankHost(spec, rank=0, device=device_of(spec.device))

        self._host = await self._in_thread("start", make)

    async def log_probs(self, batch: TrainBatch, *, model: Literal["policy", "reference"] = "policy") -> Float32:
        return cast(Float32, await self._run("log_probs", batch, model=model))

    async def route_counts(self) -> RouteCounts | None:
        return cast("RouteCounts | None", await self._run("route_counts"))

    async def train_step(self, batch: TrainBatch) -> StepMetrics:
        return cast(StepMetrics, await self._run("train_step", batch))

    async def save(self, directory: Path) -> None:
        await self._run("save", directory)

    async def load(self, directory: Path) -> None:
        await self._run("load", directory)

    async def save_hf(self, directory: Path) -> None:
        await self._run("save_hf", directory)

    async def offload(self) -> None:
        await self._run("offload")

    async def onload(self) -> None:
        await self._run("onload")

    async def open_sender(self, make: Callable[[], Sender]) -> None:
        await self._run("open_sender", make)

    async def open_senders(self, make: Callable[[int, int], SharedSender]) -> None:
        await self._run("open_senders", make)

    async def send_weights(self, version: int) -> WeightManifest:
        return cast(WeightManifest, await self._run("send_weights", version))

    async def close(self) -> None:
        """Close the backend after the call in progress, then end the thread. Idempotent."""
        if self._closed:
            return
        try:
            if self._host is not None:
                await self._run("close")
        finally:
            self._closed = True
            # After `close` the thread is idle and joins at once; a cancelled start may still be loading a model.
            self._thread.shutdown(wait=self._host is not None)

    async def _run(self, method: str, *args: Any, **kwargs: Any) -> Any:
        host = self._host
        if host is None or self._closed:
            raise RunError(f"the trainer is not running, so it cannot {method}", where="executor inprocess")
        return await self._in_thread(method, lambda: host.run(method, *args, **kwargs))

    async def _in_thread(self, method: str, call: Callable[[], Any]) -> Any:
        with waiting("driver", on=f"trainer rank 0: {method}"):
            result = await asyncio.get_running_loop().run_in_executor(self._thread, call)
        progress()
        return result


class InProcessExecutor:
    """See the module. Takes no options."""

    def __init__(self, options: None = None) -> None:
        self._trainer: InProcessTrainer | None = None
        self._engines: list[Engine] = []
        self._engine_specs: list[EngineSpec] = []
        """Of each engine."""

    async def start_trainer(self, spec: TrainerSpec) -> InProcessTrainer:
        """Start the one rank.

        Raises:
            ConfigError: more than one rank is asked for.
        """
        if spec.world_size != 1:
            raise ConfigError(
                "executor inprocess runs one trainer rank",
                expected="placement.trainer_ranks: 1",
                found=f"placement.trainer_ranks: {spec.world_size}",
                do="set executor: ray, or placement.trainer_ranks: 1",
            )
        if self._trainer is not None:
            raise RunError("this executor already runs a trainer", where="executor inprocess")
        trainer = InProcessTrainer()
        try:
            await trainer.start(spec)
        except BaseException:
            await trainer.close()
            raise
        self._trainer = trainer
        return trainer

    async def start_engines(self, spec: EngineSpec) -> Sequence[Engine]:
        """Create and start `spec.count` engines; when one fails to start, all are closed."""
        started: list[Engine] = []
        try:
            for index in range(len(self._engines), len(self._engines) + spec.count):
                await self._start_engine(spec, index, started)
        except BaseException:
            await _close_all(started)
            raise
        self._engines.extend(started)
        self._engine_specs.extend([spec] * spec.count)
        return started

    async def _start_engine(self, spec: EngineSpec, index: int, started: list[Engine]) -> None:
        with located(f"engine {index}", "starting the engine", EngineError):
            engine: Engine = load_target(spec.load)(spec.options, spec.context(index, device=device_of(spec.device)))
            started.append(engine)
            with waiting("driver", on=f"engine {index}: start"):
                await engine.start()
        progress()

    async def restart_engine(self, index: int) -> Engine:
        """Replace an engine. One that hangs in this process cannot be ended, and then this raises."""
        spec = self._engine_specs[index]
        try:
            async with asyncio.timeout(RESTART_CLOSE_S):
                await self._engines[index].close()
        except TimeoutError:
            raise EngineError(
                "an engine in the driver's process hangs and cannot be ended",
                where=f"engine {index}",
                do="set executor: ray, which gives every engine a process of its own; or restart the run with --resume",
            ) from None
        started: list[Engine] = []
        try:
            await self._start_engine(spec, index, started)
        except BaseException:
            await _close_all(started)
            raise
        (self._engines[index],) = started
        return started[0]

    async def describe(self) -> Mapping[str, str]:
        """Thread, process and host of each part."""
        process = f"process {os.getpid()} on {socket.gethostname()}"
        engines = {f"engine {index}": process for index in range(len(self._engines))}
        trainer = {} if self._trainer is None else {"trainer rank 0": f"thread trainer-0 of {process}"}
        return trainer | engines

    async def close(self) -> None:
        """Close engines, then the trainer. Idempotent."""
        engines, self._engines, self._engine_specs = self._engines, [], []
        trainer, self._trainer = self._trainer, None
        try:
            await _close_all(engines)
        finally:
            if trainer is not None:
                await trainer.close()


async def _close_all(engines: Sequence[Engine]) -> None:
    """Close every engine, whatever the others do; raise the first failure afterwards."""
    outcomes = await asyncio.gather(*(engine.close() for engine in engines), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


def require_cuda(device: str) -> None:
    """Say in plain words that CUDA is absent, before a library says it in its own.

    Raises:
        ConfigError: `device` is cuda, and torch sees none in this process.
    """
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(
                "CUDA is not available in this process",
                expected="placement.device: cuda finds a device",
                found=f"torch {torch.__version__} sees none",
                where="executor inprocess",
                do="set placement.device: cpu, or auto; or install a torch that was built for the CUDA of this host",
            )
