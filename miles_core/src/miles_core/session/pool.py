"""The engines of a run, as sessions use them. Engines may be lost and replaced without a session noticing.

If an engine is lost in the middle of a request, the request continues on another one: its prompt and the tokens sampled
so far become the prompt there. Those tokens keep their log-probs and weight versions, and none is sampled twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace

from miles_core.errors import EngineLost, SessionError
from miles_core.kinds.engine import Chunk, Engine, GenerateRequest
from miles_core.session.affinity import Affinity
from miles_core.types import FinishReason
from miles_core.watch import waiting


@dataclass(eq=False)
class _Call:
    """A task that waits for an engine."""

    task: asyncio.Task[object]
    before: int
    """How often the task had been asked to cancel before."""
    lost: str | None = None
    """Why the engine was lost while the task waited, or None."""


@dataclass
class _Member:
    engine: Engine
    lost: str | None = None
    """Why it serves nobody, or None."""
    calls: set[_Call] = field(default_factory=set)


class EnginePool:
    """All replicas of a run. Not thread-safe."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._members = [_Member(engine) for engine in engines]
        self._affinity = Affinity(len(engines))
        self._changed = asyncio.Event()
        self.requeued = 0
        """How many requests continued on another engine."""

    # --- sessions -----------------------------------------------------------------------------------------------------

    def open(self, key: str) -> tuple[Engine, str]:
        """Assign an engine to a new session. Returns an object that generates on it, or on its successor if it is lost,
        and the engine's name.

        Raises:
            SessionError: a session of that name is open.
        """
        if key in self._affinity:
            raise SessionError(
                "a session of this name is open", found=repr(key), do="close it first, or use a name of its own"
            )
        index = self._affinity.assign(key, self.serving())
        return _Routed(self, key), f"engine {index}"  # type: ignore[return-value]

    def close(self, key: str) -> None:
        self._affinity.release(key)

    def load(self) -> tuple[int, ...]:
        """Open sessions of each engine."""
        return self._affinity.load()

    # --- members ------------------------------------------------------------------------------------------------------

    def serving(self) -> frozenset[int]:
        """Engines that take requests."""
        return frozenset(index for index, member in enumerate(self._members) if member.lost is None)

    def lost(self) -> dict[int, str]:
        """Engines that take no requests, and why."""
        return {index: member.lost for index, member in enumerate(self._members) if member.lost is not None}

    def lose(self, index: int, why: str) -> None:
        """Send nothing more to an engine, and let its requests continue elsewhere. The first reason given is kept."""
        member = self._members[index]
        member.lost = member.lost or why
        for call in member.calls:
            if call.lost is None:
                call.lost = why
                call.task.cancel()
        self._notify()

    def restore(self, index: int, engine: Engine) -> None:
        """Let an engine serve in the place of a lost one. It must hold the version that the others serve."""
        self._members[index] = _Member(engine)
        self._notify()

    async def loss(self) -> None:
        """Return once some engine is lost."""
        while not self.lost():
            await self._changed.wait()

    async def route(self, key: str) -> int:
        """The engine of a session: the one it has had, or another if that is lost. Waits while all are lost."""
        while not (serving := self.serving()):
            with waiting(f"session {key}", on="an engine: all are lost"):
                await self._changed.wait()
        return self._affinity.assign(key, serving)

    def engine(self, index: int) -> Engine:
        return self._members[index].engine

    @contextmanager
    def calling(self, index: int) -> Iterator[None]:
        """While the block runs, the loss of the engine ends whatever it awaits, with EngineLost."""
        task = asyncio.current_task()
        assert task is not None
        member, call = self._members[index], _Call(task, task.cancelling())
        if member.lost is not None:
            raise EngineLost(member.lost, where=f"engine {index}")
        member.calls.add(call)
        try:
            yield
        except asyncio.CancelledError:
            # As in asyncio.timeout: only the cancellation made by `lose` becomes an error, one from outside goes on.
            if call.lost is not None and task.uncancel() <= call.before:
                raise EngineLost(call.lost, where=f"engine {index}") from None
            raise
        finally:
            member.calls.discard(call)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class _Routed:
    """An engine as a session sees it: only `generate`, on whichever engine the session is assigned to."""

    def __init__(self, pool: EnginePool, key: str) -> None:
        self._pool, self._key = pool, key

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        pool, version = self._pool, -1
        sampled: list[int] = []
        while True:
            index = await pool.route(self._key)
            engine = pool.engine(index)
            rest = _rest(request, sampled)
            try:
                async with aclosing(_stream(pool, index, rest)) as chunks:
                    async for chunk in chunks:
                        sampled += chunk.token_ids
                        version = chunk.weight_version
                        yield chunk
                return
            except EngineLost as error:
                if pool.engine(index) is engine:  # what took its place meanwhile is not to blame
                    pool.lose(index, error.message)
                pool.requeued += 1
                reason = _end(request, sampled)
                if reason is not None and request.routes:
                    raise  # the routes went with the engine, and nothing is left to sample elsewhere
                if reason is not None:  # all was sampled; only the engine's last word is missing
                    yield Chunk(token_ids=(), logprobs=(), weight_version=version, finish_reason=reason)
                    return


async def _stream(pool: EnginePool, index: int, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
    stream = pool.engine(index).generate(request)
    try:
        while True:
            with pool.calling(index):
                try:
                    chunk = await anext(stream)
                except StopAsyncIteration:
                    return
            yield chunk
    finally:
        if isinstance(stream, AsyncGenerator):
            await stream.aclose()


def _rest(request: GenerateRequest, sampled: Sequence[int]) -> GenerateRequest:
    """What is left to ask for."""
    if not sampled:
        return request
    return replace(
        request,
        token_ids=(*request.token_ids, *sampled),
        continued=request.continued + len(sampled),
        params=replace(request.params, max_tokens=request.params.max_tokens - len(sampled)),
    )


def _end(request: GenerateRequest, sampled: Sequence[int]) -> FinishReason | None:
    """How a request ended that has all its tokens, or None while some are missing."""
    if sampled and sampled[-1] in request.params.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(sampled) == request.params.max_tokens else None
