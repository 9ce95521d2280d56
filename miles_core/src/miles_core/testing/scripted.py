"""`ScriptedEngine`: an engine that says what a test tells it to, token by token, with the whole life of a real one.

    engine = ScriptedEngine([[40, 41, IM_END], [42, IM_END]])          # replies in order of arrival
    engine = ScriptedEngine(lambda request: encode("4") + [IM_END])    # or made from the request

It holds no model. Everything around sampling is real: versions, pausing between tokens, complete weight versions,
aborts, errors; so that sessions, rollouts and drivers can be tested in microseconds.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence

from miles_core.errors import EngineError, EngineLost
from miles_core.kinds.engine import Chunk, GenerateRequest, PauseMode
from miles_core.kinds.transport import Receiver
from miles_core.types import FinishReason, NamedTensor, WeightManifest
from miles_core.watch import progress, waiting

Reply = Sequence[int] | Exception
"""Token ids to sample, or what to raise instead. Ids beyond ``max_tokens`` or behind a stop token are not sampled."""


def scripted_logprob(token_id: int, position: int) -> float:
    """A log-prob in (-2, -0.01] that depends on token and position, so that a shift by one shows."""
    return -0.01 - (zlib.crc32(f"{token_id}|{position}".encode()) % 1990) / 1000


class ScriptedEngine:
    """Engine protocol over scripted replies.

    Args:
        script: Replies in order of arrival, or a function of the request. A request beyond the last reply fails.
        context_length: Prompts of this many tokens or more are refused; None is no limit.
        tokens_per_chunk: Sampled tokens per chunk.
        logprob: Of the token at a position of the row.
        turns_per_token: Turns of the event loop each token takes, so that requests interleave.
    """

    def __init__(
        self,
        script: Iterable[Reply] | Callable[[GenerateRequest], Reply],
        *,
        context_length: int | None = None,
        tokens_per_chunk: int = 1,
        logprob: Callable[[int, int], float] = scripted_logprob,
        turns_per_token: int = 1,
    ) -> None:
        self._script = script if callable(script) else None
        self._replies = iter(()) if callable(script) else iter(script)
        self._context_length = context_length
        self._tokens_per_chunk = tokens_per_chunk
        self._logprob = logprob
        self._turns = turns_per_token
        self._version = -1
        self._staged: WeightManifest | None = None
        self._served: dict[str, str] = {}
        self._receiver: Receiver | None = None
        self._going = asyncio.Event()
        self._going.set()
        self._ended: dict[str, asyncio.Event] = {}
        """Of each request in flight: set by a pause that aborts it."""
        self._closed = False
        self.requests: list[GenerateRequest] = []
        """Every request taken, in order of arrival."""
        self.running: set[str] = set()
        """Ids of the requests in flight."""
        self.aborted: list[str] = []
        """Ids of the requests whose iterator was closed early."""
        self.tokens_sampled = 0

    async def start(self) -> None: ...

    # --- sampling -----------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Sample the scripted reply; ends with `stop` where it ends by itself and `length` at ``max_tokens``."""
        reply = self._reply(request)
        self.requests.append(request)
        self.running.add(request.request_id)
        end = self._ended[request.request_id] = asyncio.Event()
        ended = False
        try:
            if isinstance(reply, Exception):
                ended = True
                raise reply
            ids, reason = self._cut(request, reply)
            for start in range(0, max(len(ids), 1), self._tokens_per_chunk):
                part = ids[start : start + self._tokens_per_chunk]
                for _ in range(self._turns * len(part)):
                    await asyncio.sleep(0)
                with waiting(f"request {request.request_id}", on="scripted engine: resume"):
                    await _first_of(self._going, end)
                self._check_open()
                if end.is_set():
                    ended = True
                    yield self._chunk(request, start, (), FinishReason.ABORT)
                    return
                ended = start + self._tokens_per_chunk >= len(ids)
                yield self._chunk(request, start, part, reason if ended else None)
        finally:
            self.running.discard(request.request_id)
            self._ended.pop(request.request_id, None)
            if not ended:
                self.aborted.append(request.request_id)

    def _reply(self, request: GenerateRequest) -> Reply:
        self._check_open()
        if self._context_length is not None and len(request.token_ids) >= self._context_length:
            raise EngineError(
                f"request {request.request_id}: the prompt does not fit the context",
                expected=f"fewer than {self._context_length} tokens",
                found=f"{len(request.token_ids)} tokens",
                where="scripted engine",
            )
        if self._script is not None:
            return self._script(request)
        reply = next(self._replies, None)
        if reply is None:
            raise EngineError(
                "the script has no reply left",
                expected="a reply for every request",
                found=f"request {request.request_id} after {len(self.requests)} replies",
                where="scripted engine",
            )
        return reply

    def _cut(self, request: GenerateRequest, reply: Sequence[int]) -> tuple[tuple[int, ...], FinishReason]:
        ids = tuple(reply)
        stops = request.params.stop_token_ids
        end = next((i + 1 for i, token in enumerate(ids) if token in stops), len(ids))
        room = request.params.max_tokens
        if self._context_length is not None:
            room = min(room, self._context_length - len(request.token_ids))
        # A reply that fills the room exactly without a stop token is cut off as far as anyone can tell.
        whole = end < room or (end == room and end > 0 and ids[end - 1] in stops)
        return ids[: min(end, room)], FinishReason.STOP if whole else FinishReason.LENGTH

    def _chunk(self, request: GenerateRequest, start: int, ids: tuple[int, ...], reason: FinishReason | None) -> Chunk:
        first = len(request.token_ids) + start
        self.tokens_sampled += len(ids)
        progress()
        return Chunk(
            token_ids=ids,
            logprobs=tuple(self._logprob(token, first + i) for i, token in enumerate(ids)),
            weight_version=self._version,
            finish_reason=reason,
        )

    def _check_open(self) -> None:
        if self._closed:
            raise EngineLost("the engine was closed", expected="an open engine", where="scripted engine")

    # --- weights ------------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Hold requests between tokens; without KV, to retract them and to freeze them is one thing."""
        self._going.clear()
        if mode == "abort":
            for ended in self._ended.values():
                ended.set()

    async def resume(self) -> None:
        self._going.set()

    async def open_receiver(self, make: Callable[[], Receiver]) -> None:
        before, self._receiver = self._receiver, None
        if before is not None:
            before.close()
        self._receiver = await asyncio.to_thread(make)

    async def receive(self, version: int) -> WeightManifest:
        if self._receiver is None:
            raise EngineError("no transport is connected", expected="open_receiver first", where="scripted engine")
        self._staged = None
        self._staged = await asyncio.to_thread(_receive, self._receiver, version)
        return self._staged

    async def activate(self, version: int) -> None:
        if self._staged is None or self._staged.version != version:
            raise EngineError(
                f"weight version {version} cannot be activated",
                expected=f"version {version}, staged completely",
                found="nothing staged" if self._staged is None else f"version {self._staged.version} staged",
                where="scripted engine",
            )
        self._served = dict(self._staged.digests)
        self._version, self._staged = version, None

    async def version(self) -> int:
        return self._version

    async def scramble(self, seed: int) -> None:
        self._served = dict.fromkeys(self._served, f"noise {seed}")

    async def digests(self, names: Collection[str] | None = None) -> Mapping[str, str]:
        return {name: digest for name, digest in self._served.items() if names is None or name in names}

    async def stats(self) -> Mapping[str, float]:
        return {
            "running": float(len(self.running)),
            "waiting": 0.0,
            "tokens_sampled": float(self.tokens_sampled),
            "cached_tokens": 0.0,
        }

    async def close(self) -> None:
        self._closed = True
        self._going.set()
        if self._receiver is not None:
            self._receiver.close()


async def _first_of(going: asyncio.Event, ended: asyncio.Event) -> None:
    """Wait until one of them is set; without a task of its own in the common case."""
    if going.is_set() or ended.is_set():
        return
    tasks = [asyncio.ensure_future(event.wait()) for event in (going, ended)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _receive(receiver: Receiver, version: int) -> WeightManifest:
    from miles_core.weights.digests import manifest

    last = False
    tensors: list[NamedTensor] = []
    for bucket in receiver.receive(version):
        tensors += bucket.tensors
        last = bucket.last
    if not last:
        raise EngineError(
            f"weight version {version} was refused: it ended without a last bucket", where="scripted engine"
        )
    return manifest(version, tensors)
