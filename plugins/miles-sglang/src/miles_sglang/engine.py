"""Engine `sglang`: a server of its own, or one that runs already, behind Miles' engine protocol.

    CREATED ──start──> SERVING <──pause/resume──> PAUSED          any ──close──> CLOSED

Weights are staged beside the server and enter it in `activate`. Its updates are in place, so the old version survives a
failure not inside the server but in the store: the server is started again, or reloaded, with what it served. The same
path serves a server that died; requests go on from the tokens they have.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

from miles_core.errors import EngineError
from miles_core.kinds.engine import Chunk, EngineContext, GenerateRequest, PauseMode
from miles_core.kinds.transport import Receiver
from miles_core.requests import check_request
from miles_core.types import FinishReason, WeightManifest
from miles_core.watch import progress, waiting
from miles_sglang.adapter import load, read_adapter, unload
from miles_sglang.attempt import Attempt
from miles_sglang.checkpoint import read_checkpoint, row_limit
from miles_sglang.claim import Claim
from miles_sglang.client import ServerGone
from miles_sglang.options import SglangOptions
from miles_sglang.requests import output_limit, own_problem, rank_of, seed_of
from miles_sglang.rows import Ending, Row, last_chunk
from miles_sglang.served import inside, prove
from miles_sglang.server import Server
from miles_sglang.settings import check_model, check_settings, url_of
from miles_sglang.staging import WeightStore
from miles_sglang.updates import DiskUpdate, Update, clear, make_update

ABORT_AGAIN_S = 0.05
"""An abort that overtakes its request finds nothing; it is sent until the request has ended."""


class Life(StrEnum):
    CREATED = "created"
    SERVING = "serving"
    PAUSED = "paused"
    CLOSED = "closed"


class SglangEngine:
    """See `miles_core.kinds.engine.Engine`."""

    def __init__(self, options: SglangOptions, context: EngineContext) -> None:
        self._options, self._context = options, context
        self._name = f"engine sglang {context.index}"
        self._life = Life.CREATED
        self._open = asyncio.Event()
        self._version, self._epoch = -1, 0
        self._frozen = False
        self._rows: dict[Row, asyncio.Queue[Chunk | Exception]] = {}
        self._arrivals = itertools.count()
        self._rids = itertools.count()
        self._receiver: Receiver | None = None
        self._updating = asyncio.Lock()
        self._counts = {"tokens_sampled": 0, "cached_tokens": 0, "resubmitted": 0}
        url = url_of(options.urls, context.index, self._name)
        self._claim = Claim.of_this_process(
            self._name, lambda: self._server.client, lambda why: self._server.lose(why), attached=url is not None
        )
        self._checkpoint = read_checkpoint(Path(context.model_path), options.dtype)
        self._update = make_update(options)
        self._adapter = read_adapter(Path(options.adapter)) if options.adapter else None
        self._adapter_name: str | None = None
        self._limit = row_limit(context.context_length, self._checkpoint, self._name, "model.context_length")
        self._store = WeightStore(self._checkpoint, options.staging_dir, self._name)
        self._server = Server(
            options,
            context,
            context_length=self._limit,
            stream_interval=options.stream_interval,
            url=url,
            check=self._check,
            restore=self._restore,
            on_up=self._after_revival,
            scratch=[self._store.root],
            where=self._name,
            log_name=f"engine-{context.index}",
            adapter=self._adapter,
        )

    def _check(self, info: Mapping[str, Any]) -> None:
        check_settings(info, self._options, self._context, self._limit, self._name)
        self._adapter_name = None  # a server that was started has none loaded

    async def _restore(self) -> None:
        """Load the version that must be served, where the server does not have it."""
        server, served = self._server, self._store.served
        if server.attached:
            await check_model(server.client, self._checkpoint, self._name)
            await self._claim.take()
            await clear(server.client, server.dialect)  # nobody knows what it holds, nor how an earlier run left it
        if served is not None or server.attached:
            folder = served or self._checkpoint.path
            await self._push(self._update if served else DiskUpdate(), folder, self._version, flush=True)
            await prove(server, self._checkpoint, folder, shared=self._store.root.parent)
        if self._adapter is not None:
            self._adapter_name = await load(server.client, self._adapter)

    async def _push(self, update: Update, folder: Path, version: int, *, flush: bool) -> None:
        """Load a folder's weights into the server, and ask it which ones it serves now."""
        server, name = self._server, self._claim.name(version)
        await self._claim.check_held()
        await update.push(server.client, server.dialect, folder, name, flush=flush)
        if (served := await server.served_version()) != name:
            raise self._error("the server serves another version", expected=name, found=served)

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        if self._life is not Life.CREATED:
            raise self._error("the engine was started twice", expected="created", found=self._life)
        try:
            self._store.open()  # the server's guard, which starts next, removes it should this process vanish
            await self._server.start()
        except BaseException:
            await self.close()
            raise
        self._life = Life.SERVING
        self._open.set()

    async def close(self) -> None:
        if self._life is Life.CLOSED:
            return
        self._life = Life.CLOSED
        closed = self._error("the engine was closed", expected="an open engine", found="close() was called")
        for news in self._rows.values():
            news.put_nowait(closed)
        if self._receiver is not None:
            await asyncio.to_thread(self._receiver.close)
        await self._update.close(None)
        with suppress(EngineError):  # an attached server goes on without us, if it goes on
            await self._claim.release()
        await self._server.close()
        await asyncio.to_thread(self._store.close)

    def _error(self, message: str, *, expected: str, found: str, do: str | None = None) -> EngineError:
        return EngineError(message, expected=expected, found=found, where=self._name, do=do)

    def _running(self) -> Server:
        if self._life in (Life.CREATED, Life.CLOSED):
            raise self._error("the engine is not serving", expected="a started engine", found=self._life)
        return self._server

    # --- requests -----------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Sample; see the protocol. Output ends with `length` when the context is full, whatever `max_tokens` says."""
        self._running()
        check_request(
            request,
            vocabulary=self._checkpoint.vocabulary,
            context=self._limit,
            where=self._name,
            own=own_problem(
                request, self._checkpoint, routes=self._context.routes, deterministic=self._options.deterministic
            ),
        )
        row = Row(
            request,
            seed_of(request, self._context.seed, self._context.index, next(self._arrivals)),
            output_limit(request, self._limit),
            rank_of(request.session_id, self._options.data_parallel),
        )
        # A task of its own: pauses end attempts whether or not anybody reads their chunks at that moment.
        news: asyncio.Queue[Chunk | Exception] = asyncio.Queue()
        self._rows[row] = news
        task = asyncio.create_task(self._drive(row, news), name=f"{self._name}: {request.request_id}")
        try:
            while True:
                if news.empty():
                    with waiting(f"request {request.request_id}", on=self._name):
                        item = await news.get()
                else:
                    item = news.get_nowait()
                if isinstance(item, Exception):
                    raise item
                self._running()
                self._counts["tokens_sampled"] += len(item.token_ids)
                yield item
                if item.finish_reason is not None:
                    self._counts["cached_tokens"] += item.cached_tokens
                    return
        finally:
            del self._rows[row]
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _drive(self, row: Row, news: asyncio.Queue[Chunk | Exception]) -> None:
        def emit(chunk: Chunk) -> None:
            news.put_nowait(chunk)
            progress()

        try:
            await self._sample(row, emit)
        except Exception as error:  # noqa: BLE001 -- named boundary: whoever reads the request raises it
            news.put_nowait(error)

    async def _sample(self, row: Row, emit: Callable[[Chunk], None]) -> None:
        """Emit the chunks of all attempts a row takes, to the one with the finish reason."""
        while True:
            await self._open.wait()
            server = self._running()
            if server.failure is not None:
                raise server.failure
            if row.ending == "abort":
                return emit(last_chunk(self._version, FinishReason.ABORT, row))
            if len(row.ids) >= row.limit:
                return emit(last_chunk(self._version, FinishReason.LENGTH, row))
            generation = server.generation
            row.rid = f"{self._name}/{next(self._rids)}/{row.request.request_id}"
            interval, adapter = self._options.stream_interval, self._adapter_name
            where = f"{self._name}, request {row.request.request_id}"
            attempt = Attempt(
                row, server, self._checkpoint, lambda: self._epoch, self._number, interval, where, adapter=adapter
            )
            try:
                if await attempt.run(self._version, emit):
                    return
            except ServerGone:
                self._running()
                await server.mend(generation)
            self._counts["resubmitted"] += 1
            await attempt.rest()

    def _number(self, name: object) -> int:
        return self._claim.read(name, self._version)

    # --- pausing ------------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = "retract") -> None:
        server = self._running()
        self._life = Life.PAUSED
        self._open.clear()
        server.idle_checks = False
        if mode == "in-place" and not server.dialect.has("version-spans"):
            await self.resume()
            raise self._error(
                "this server cannot be paused in place",
                expected="sglang 0.5.19 or later, whose replies tell which weights made a token",
                found=f"sglang {server.dialect.version}",
                do="set schedule.pause: retract, or upgrade the server",
            )
        with waiting(f"pause of {self._name}", on="the server"):
            try:
                if mode == "abort":
                    await self._end_rows("abort")
                elif mode == "retract" and (self._context.routes or not server.dialect.has("safe-retract")):
                    # With routes: a server's own retract would record those of the recomputation over the first ones.
                    await self._end_rows("retract")
                await server.tell("/pause_generation", {"mode": "in_place" if mode == "in-place" else "retract"})
                await server.barrier()
            except ServerGone:
                await server.revive(server.generation)
        self._frozen = mode == "in-place" and any(row.rid for row in self._rows)

    async def _end_rows(self, ending: Ending) -> None:
        """Abort every attempt in flight; each row says by itself what that means for it."""
        client = self._running().client
        submitted = {row for row in self._rows if row.rid}
        for row in self._rows:
            # A row that an earlier pause took back has no attempt; it ends when it would begin another.
            if row in submitted or (ending == "abort" and row.ids):
                row.ending = ending
        while any(row.rid for row in submitted):
            await client.post("/abort_request", {"abort_all": True})  # one message: they must stop now, not in turn
            await asyncio.sleep(ABORT_AGAIN_S)

    async def resume(self) -> None:
        server = self._running()
        try:
            await server.tell("/continue_generation", {})
        except ServerGone:
            await server.revive(server.generation)
        self._life = Life.SERVING
        self._frozen = False
        server.idle_checks = True
        self._open.set()

    def _after_revival(self) -> None:
        self._epoch += 1
        if self._server.failure is not None:
            self._open.set()

    async def use_adapter(self, folder: str | None) -> None:
        """Sample through another LoRA adapter, or through none, from the next submission on.

        Raises:
            EngineError: the folder holds none, or the server was not started for it (`engine.adapter`).
        """
        server = self._running()
        adapter = None if folder is None else read_adapter(Path(folder))
        async with self._updating:
            name = None if adapter is None else await load(server.client, adapter)
            self._epoch += 1
            before, self._adapter_name, self._adapter = self._adapter_name, name, adapter
            if before is not None:
                await unload(server.client, before)

    # --- weights ------------------------------------------------------------------------------------------------------

    async def open_receiver(self, make: Callable[[], Receiver]) -> None:
        if self._options.adapter is not None:
            raise self._error(
                "weights cannot be published under a LoRA adapter",
                expected="a run without one, of which no trainer knows",
                found=f"engine.adapter {self._options.adapter}",
                do="merge it into the checkpoint; engine.adapter is for `miles serve`",
            )
        before, self._receiver = self._receiver, None
        if before is not None:
            before.close()
        # In a thread of its own: making it may block until the sender is there, and requests must go on meanwhile.
        self._receiver = await asyncio.to_thread(make)

    async def receive(self, version: int) -> WeightManifest:
        receiver = self._receiver
        self._running()
        if receiver is None:
            raise self._error("no transport is connected", expected="open_receiver first", found="receive")
        with waiting(f"{self._name}, weight version {version}", on="the trainer's buckets"):
            received = await asyncio.to_thread(lambda: self._store.stage(version, receiver.receive(version)))
        progress()
        return received

    async def activate(self, version: int) -> None:
        self._running()
        staged = self._store.staged
        if staged is None or staged[0] != version:
            raise self._error(
                f"weight version {version} cannot be activated",
                expected=f"version {version}, staged completely",
                found="nothing staged" if staged is None else f"version {staged[0]} staged",
                do="receive it first",
            )
        # Shielded: a caller that gives up must not leave new weights under the old version's number.
        await asyncio.shield(self._swap(staged[1], version))
        progress()

    async def _swap(self, folder: Path, version: int) -> None:
        server = self._server
        async with self._updating:
            self._epoch += 1
            generation = server.generation
            try:
                await self._push(self._update, folder, version, flush=not self._frozen)
            except Exception as error:
                # What the server holds now is unknown: back to the version that was served, whole.
                self._store.drop_staged()
                await server.revive(generation)
                raise EngineError(
                    f"weight version {version} did not enter the server",
                    found=str(error),
                    where=self._name,
                    do=f"the server was reloaded and serves version {self._version} again; read its log",
                ) from error
            self._version = version
            await asyncio.to_thread(self._store.commit)

    async def version(self) -> int:
        if self._server.failure is not None:  # also an engine that nobody asks for tokens must be found lost
            raise self._server.failure
        return self._version

    async def scramble(self, seed: int) -> None:
        self._epoch += 1  # prefixes of before cannot be continued, so nothing need be flushed
        await self._inside({"op": "scramble", "seed": seed})

    async def digests(self, names: Collection[str] | None = None) -> Mapping[str, str]:
        chosen = sorted(self._checkpoint.forms if names is None else self._checkpoint.forms.keys() & set(names))
        answer = await self._inside({"op": "digests", "names": chosen})
        found: dict[str, str] = answer["digests"]
        return found

    async def _inside(self, request: dict[str, Any]) -> dict[str, Any]:
        server = self._running()
        async with self._updating:
            return await inside(server, self._checkpoint, request, shared=self._store.root.parent)

    async def stats(self) -> Mapping[str, float]:
        """Gauges and counts since the start: requests at the server and waiting, tokens sampled and reused, requests
        sent again, starts of the server."""
        running = sum(bool(row.rid) for row in self._rows)
        return {
            "running": float(running),
            "waiting": float(len(self._rows) - running),
            **{name: float(count) for name, count in self._counts.items()},
            "server_starts": float(self._server.generation),
        }
