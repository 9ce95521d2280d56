"""What runs in the worker processes: one rank, or one engine, behind a name-based call.

Workers discover nothing: they import this module and the `load` strings they are given.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from miles_core.errors import EngineError, MilesError, RunError
from miles_core.executors.rank import RankHost, located
from miles_core.kinds.engine import Chunk, Engine, EngineContext, GenerateRequest
from miles_core.kinds.executor import TrainerSpec
from miles_core.kinds.transport import Receiver
from miles_core.registry import load_target

COALESCE_S = 0.003
"""Chunks that arrive within it travel in one message: a decode step of many requests costs one round trip."""
POLL_S = 1.0
"""How long `drain` waits before it answers with nothing."""


@dataclass(frozen=True, slots=True)
class Process:
    """Where an actor runs."""

    host: str
    address: str
    pid: int
    node: str
    """Ray's node id."""


def this_process() -> Process:
    import ray

    context = ray.get_runtime_context()
    return Process(
        host=socket.gethostname(),
        address=ray.util.get_node_ip_address(),
        pid=os.getpid(),
        node=str(context.get_node_id()),
    )


class RankActor:
    """One trainer rank; its methods run one after the other in the process's main thread."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._host: RankHost | None = None
        self._store: Any = None
        # Batches come as read-only views of shared memory. No rank writes to its batch, so torch's advice is moot.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")

    def process(self) -> Process:
        return this_process()

    def open_store(self, host: str) -> int:
        """Bind the rendezvous of all ranks to a free port here; rank 0 only."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return int(self._store.port)

    def start(self, spec: TrainerSpec, device: str, host: str, port: int, timeout_s: float) -> None:
        """Join the default process group when there are several ranks, then build the backend."""
        with located(f"trainer rank {self._rank}", "starting the rank"):
            if spec.world_size > 1:
                self._join(spec.world_size, device, host, port, timeout_s)
            self._host = RankHost(spec, rank=self._rank, device=device)

    def run(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Any = None) -> Any:
        """Call the rank's method; `batch`, when given, goes first. Ray resolves references only at the top level."""
        if self._host is None:
            raise RunError("the rank has not started", where=f"trainer rank {self._rank}")
        return self._host.run(method, *(args if batch is None else (batch, *args)), **kwargs)

    def stop(self) -> None:
        """Close the backend and leave the process group."""
        import torch.distributed as dist

        host, self._host = self._host, None
        try:
            if host is not None:
                host.run("close")
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def _join(self, world_size: int, device: str, host: str, port: int, timeout_s: float) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        timeout = timedelta(seconds=timeout_s)
        if self._store is None:
            self._store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        if device.startswith("cuda"):
            torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo",
            store=self._store,
            rank=self._rank,
            world_size=world_size,
            timeout=timeout,
        )


ENGINE_METHODS = frozenset({"pause", "resume", "receive", "activate", "version", "scramble", "digests", "stats"})

Event = tuple[int, list[Chunk], MilesError | None]
"""Stream, its new chunks, and how it failed."""


class EngineActor:
    """One engine; an asyncio actor, so that requests, pauses and updates interleave as they do in one process."""

    def __init__(self, index: int) -> None:
        self._where = f"engine {index}"
        self._engine: Engine | None = None
        self._streams: dict[int, asyncio.Task[None]] = {}
        self._outbox: dict[int, list[Chunk]] = {}
        self._failures: dict[int, MilesError] = {}
        self._news = asyncio.Event()

    async def process(self) -> Process:
        return this_process()

    async def start(self, load: str, options: Any, context: EngineContext) -> None:
        with located(self._where, "starting the engine", EngineError):
            self._engine = load_target(load)(options, context)
            await self._engine.start()

    async def call(self, method: str, args: tuple[Any, ...]) -> Any:
        if method not in ENGINE_METHODS:
            raise EngineError(f"an engine has no method {method!r}", where=self._where)
        with located(self._where, method, EngineError):
            return await getattr(self._running(), method)(*args)

    async def open_receiver(self, make: Callable[[], Receiver]) -> None:
        with located(self._where, "open_receiver", EngineError):
            await self._running().open_receiver(make)

    async def submit(self, stream: int, request: GenerateRequest) -> None:
        """Begin to generate; chunks are fetched with `drain`."""
        self._running()
        task = asyncio.create_task(self._generate(stream, request))
        self._streams[stream] = task
        task.add_done_callback(lambda _: self._streams.pop(stream, None))

    async def drain(self) -> list[Event]:
        """All chunks since the last call, of all streams; waits a while for the first one."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), POLL_S)
            await asyncio.sleep(COALESCE_S)
        self._news.clear()
        outbox, self._outbox = self._outbox, {}
        failures, self._failures = self._failures, {}
        return [(stream, outbox.get(stream, []), failures.get(stream)) for stream in outbox.keys() | failures.keys()]

    async def abort(self, stream: int) -> None:
        """End a stream whose reader has gone."""
        task = self._streams.get(stream)
        if task is not None:
            task.cancel()

    async def stop(self) -> None:
        for task in list(self._streams.values()):
            task.cancel()
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()

    async def _generate(self, stream: int, request: GenerateRequest) -> None:
        try:
            with located(self._where, "generate", EngineError):
                async with contextlib.aclosing(self._running().generate(request)) as chunks:  # type: ignore[type-var]
                    async for chunk in chunks:
                        self._outbox.setdefault(stream, []).append(chunk)
                        self._news.set()
        except MilesError as error:
            self._failures[stream] = error
            self._news.set()

    def _running(self) -> Engine:
        if self._engine is None:
            raise EngineError("the engine is closed", where=self._where)
        return self._engine
