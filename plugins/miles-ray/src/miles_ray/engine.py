"""An engine in another process, as the driver sees it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from typing import Any, cast

import ray

from miles_core.errors import EngineError, EngineLost, MilesError
from miles_core.kinds.engine import Chunk, GenerateRequest, PauseMode
from miles_core.kinds.transport import Receiver
from miles_core.types import WeightManifest
from miles_core.watch import progress, waiting
from miles_ray.remote import fetch

CLOSE_S = 10.0
"""How long an engine may take to close before it is killed."""

_News = Chunk | MilesError


class RayEngine:
    """`kinds.engine.Engine` over an `EngineActor`.

    All streams of the engine share one long poll, the pump: a decode step of a hundred requests travels as one message.
    It runs while there is a reader.
    """

    def __init__(self, actor: Any, index: int) -> None:
        self._actor: Any = actor
        self._who = f"engine {index}"
        self._numbers = itertools.count()
        self._readers: dict[int, asyncio.Queue[_News]] = {}
        self._pump: asyncio.Task[None] | None = None
        self.messages = 0
        """Round trips of the pump so far."""

    async def start(self) -> None:
        """The executor started the engine in its process already."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        stream = next(self._numbers)
        queue: asyncio.Queue[_News] = asyncio.Queue()
        self._readers[stream] = queue
        finished = False
        try:
            await self._fetch(self._live().submit.remote(stream, request), "generate")
            self._start_pump()
            while not finished:
                with waiting(f"request {request.request_id}", on=f"{self._who}: the next tokens"):
                    news = await queue.get()
                if isinstance(news, MilesError):
                    finished = True
                    raise news
                finished = news.finish_reason is not None
                yield news
        finally:
            del self._readers[stream]
            if not finished and self._actor is not None:
                self._actor.abort.remote(stream)  # nobody waits for it: the stream is closed on this side either way

    async def pause(self, mode: PauseMode = "retract") -> None:
        await self._call("pause", mode)

    async def resume(self) -> None:
        await self._call("resume")

    async def open_receiver(self, make: Callable[[], Receiver]) -> None:
        await self._fetch(self._live().open_receiver.remote(make), "open_receiver")

    async def receive(self, version: int) -> WeightManifest:
        return cast(WeightManifest, await self._call("receive", version))

    async def activate(self, version: int) -> None:
        await self._call("activate", version)

    async def version(self) -> int:
        return cast(int, await self._call("version"))

    async def scramble(self, seed: int) -> None:
        await self._call("scramble", seed)

    async def digests(self, names: Collection[str] | None = None) -> Mapping[str, str]:
        return cast(Mapping[str, str], await self._call("digests", names))

    async def stats(self) -> Mapping[str, float]:
        return cast(Mapping[str, float], await self._call("stats"))

    async def close(self) -> None:
        """Close the engine and end its process. Idempotent; one that does not answer is killed."""
        actor, self._actor = self._actor, None
        if actor is None:
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                await actor.stop.remote()
        except (TimeoutError, ray.exceptions.RayError):
            pass  # it is killed next, however it failed
        await self._end(actor, "the engine is closed")

    async def kill(self, why: str) -> None:
        """End its process without asking. Idempotent."""
        actor, self._actor = self._actor, None
        if actor is not None:
            await self._end(actor, why)

    async def _end(self, actor: Any, why: str) -> None:
        ray.kill(actor)
        self._fail_readers(EngineLost(why, where=self._who))
        pump, self._pump = self._pump, None
        if pump is not None:
            pump.cancel()
            await asyncio.wait([pump])

    def _start_pump(self) -> None:
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run_pump())

    async def _run_pump(self) -> None:
        while self._readers and self._actor is not None:
            try:
                events = await fetch(self._actor.drain.remote(), who=self._who, died=EngineLost, doing="generate")
            except MilesError as error:
                self._fail_readers(error)  # every waiting request learns of it; nobody else awaits this task
                return
            for stream, chunks, failure in events:
                reader = self._readers.get(stream)
                if reader is None:
                    continue
                for chunk in chunks:
                    reader.put_nowait(chunk)
                if failure is not None:
                    reader.put_nowait(failure)
            self.messages += 1
            if events:
                progress()

    def _fail_readers(self, error: MilesError) -> None:
        for reader in self._readers.values():
            reader.put_nowait(error)

    async def _call(self, method: str, *args: Any) -> Any:
        return await self._fetch(self._live().call.remote(method, args), method)

    async def _fetch(self, ref: Any, doing: str) -> Any:
        return await fetch(ref, who=self._who, died=EngineLost, failed=EngineError, doing=doing)

    def _live(self) -> Any:
        if self._actor is None:
            raise EngineLost("the engine is closed", where=self._who)
        return self._actor
