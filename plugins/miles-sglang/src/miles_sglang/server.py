"""A server and its life: started or attached, watched, started again with the weights it served.

DOWN ──start──> UP ──dies, hangs, or loses its weights──> DOWN ──revive──> UP        revive fails ──> LOST
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

from miles_core.errors import EngineError, EngineLost, MilesError
from miles_core.kinds.engine import EngineContext
from miles_core.restarts import RestartBudget
from miles_core.watch import waiting
from miles_sglang.adapter import Adapter
from miles_sglang.claim import served_name
from miles_sglang.client import Client, Json, ServerGone, without_password
from miles_sglang.dialect import Dialect
from miles_sglang.launch import command, environment
from miles_sglang.options import ServerOptions
from miles_sglang.process import Guard, ServerProcess, reserved_port

log = logging.getLogger(__name__)

STARTS = 3
"""Of a server that lacks a port."""
POLL_S = 0.2
"""Between two questions whether a starting server is ready."""


class Health(StrEnum):
    DOWN = "down"
    UP = "up"
    LOST = "lost"


class Server:
    """One server of one engine.

    Args:
        context_length: Tokens of a row at most.
        stream_interval: Tokens of one message.
        url: Of a server to attach to; None starts one.
        check: Called with what GET /server_info tells; raises `EngineError` for a server that does not fit.
        restore: Called after each start: makes the server serve what it must.
        on_up: Called after each revival, before requests are taken.
        scratch: Folders to remove should this process vanish.
        adapter: One the server must have room for.
        log_name: Of the log file, without its ending.
    """

    def __init__(
        self,
        options: ServerOptions,
        context: EngineContext,
        *,
        context_length: int,
        stream_interval: int,
        url: str | None,
        check: Callable[[Mapping[str, Any]], None],
        restore: Callable[[], Awaitable[None]],
        on_up: Callable[[], None],
        scratch: Sequence[Path],
        where: str,
        log_name: str,
        adapter: Adapter | None = None,
    ) -> None:
        self._options, self._context, self._context_length = options, context, context_length
        self._stream_interval, self._url, self._scratch = stream_interval, url, scratch
        self._check, self._restore, self._on_up = check, restore, on_up
        self._address = None if url is None else without_password(url)
        self._where, self._log_name, self._adapter = where, log_name, adapter
        self._process: ServerProcess | None = None
        self._guard: Guard | None = None  # of what is staged beside an attached server
        self._client: Client | None = None
        self._dialect: Dialect | None = None
        self._watch: asyncio.Task[None] | None = None
        self._reviving, self._judging = asyncio.Lock(), asyncio.Lock()
        self._answered_at = -math.inf
        """When a question after a broken connection began that the server then answered."""
        self._revivals = RestartBudget(options.restarts, options.restarts_within_s)
        self._told = False
        self.health = Health.DOWN
        self.failure: EngineLost | None = None
        self.generation = 0
        """Counts starts; a request that failed under an older one need not report its server again."""
        self.idle_checks = True
        """Off while the server is paused: its health check would wait for a token."""

    @property
    def client(self) -> Client:
        if self._client is None:
            raise EngineError("the server is not running", found=self.health, where=self._where)
        return self._client

    @property
    def dialect(self) -> Dialect:
        if self._dialect is None:
            raise EngineError("the server is not running", found=self.health, where=self._where)
        return self._dialect

    @property
    def where(self) -> str:
        """Its name, for errors."""
        return self._where

    @property
    def ranks(self) -> int:
        """Of one replica."""
        return self._options.tensor_parallel

    @property
    def attached(self) -> bool:
        return self._url is not None

    @property
    def process(self) -> ServerProcess | None:
        """None for an attached server."""
        return self._process

    async def start(self) -> None:
        """Start or attach, check what is there, restore what it must serve.

        Raises:
            EngineError: it did not start in time, is too old, or has settings that cannot work.
        """
        with waiting(
            self._where,
            on="the SGLang server to start" if self._url is None else f"the server at {without_password(self._url)}",
        ):
            if self._url is None:
                await self._launch()
            else:
                self._guard = self._guard or (Guard(None, self._scratch) if self._scratch else None)
                self._client = Client(self._url, self._where, self._options.start_timeout_s)
            info = await self.client.get("/server_info", timeout_s=60)
        if not isinstance(info, dict):
            raise EngineError(
                "what answers is no SGLang",
                expected="the settings of a server, as GET /server_info of SGLang gives them",
                found=repr(info)[:200],
                where=self._where,
                do=f"look what serves {self._address}",
            )
        self._dialect = Dialect.of(str(info.get("version")), self._where)
        if not self._told:
            self._told = True
            for remark in self._dialect.remarks():
                log.warning("%s: sglang %s: %s", self._where, self._dialect.version, remark)
        self._check(info)
        await self._restore()
        self.generation += 1
        self.health = Health.UP
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_over(), name=f"{self._where}: health")

    async def revive(self, generation: int) -> None:
        """Bring a server that failed back, unless somebody did since `generation`.

        Raises:
            EngineLost: it cannot be brought back; nor will it be later.
        """
        async with self._reviving:
            if self.failure is not None:
                raise self.failure
            if self.generation != generation:
                return
            self.health = Health.DOWN
            if self._revivals.wait_s():
                self._lose("the server failed too often", f"restarts: {self._revivals}", self._tail())
            self._revivals.count()
            number = self._revivals.total
            log.warning("%s: the server failed and is brought back (%d): %s", self._where, number, self._tail())
            try:
                await self._stop()
                await self.start()
            except MilesError as error:
                self._lose("the server failed and could not be brought back", "a server that serves", str(error))
            self._on_up()

    async def alive(self) -> bool:
        """Whether the server answers and could generate."""
        if self._process is not None and self._process.exit_code is not None:
            return False
        try:
            await self.client.get(
                "/health" if self.idle_checks else "/model_info", timeout_s=self._options.health_interval_s
            )
        except EngineError:
            return False
        return True

    async def mend(self, generation: int) -> None:
        """After a connection broke: bring the server back if it is gone. One that answers has lost a connection only.

        Raises:
            EngineLost: it cannot be brought back.
        """
        broke = time.monotonic()
        async with self._judging:  # a thousand requests may have broken at once: they ask once
            if self.health is Health.UP and self.generation == generation:
                if self._answered_at < broke:
                    asked = time.monotonic()
                    self._answered_at = asked if await self.alive() else self._answered_at
                if self._answered_at >= broke:
                    return
        await self.revive(generation)

    async def tell(self, path: str, body: Json) -> None:
        """POST what may be said twice: once more where only the connection broke.

        Raises:
            ServerGone: the server is gone.
            EngineError: it refused.
        """
        try:
            await self.client.post(path, body)
        except ServerGone:
            if not await self.alive():
                raise
            await self.client.post(path, body)

    async def served_version(self) -> str:
        return await served_name(self.client)

    async def barrier(self) -> None:
        """Return after the scheduler did everything it was told before: pauses are sent to it and not answered."""
        await self.client.get("/server_info", timeout_s=60)

    async def close(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        await self._stop()
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.dismiss()
        self.health = Health.DOWN

    async def _launch(self) -> None:
        """Start the process, with other ports where somebody took one that it found by itself."""
        for start in range(1, STARTS + 1):
            with reserved_port() as port, reserved_port() as collectives:
                try:
                    return await self._launch_at(port, collectives)
                except EngineError:
                    if start == STARTS or self._process is None or not self._process.lacked_port():
                        raise
            log.warning("%s: a port that the server wanted was taken; it is started again", self._where)
            await self._stop()

    async def _launch_at(self, port: int, collectives: int) -> None:
        name = f"miles-{secrets.token_hex(8)}"
        argv = command(
            self._options,
            self._context,
            context_length=self._context_length,
            port=port,
            collectives_port=collectives,
            name=name,
            version=-1,
            stream_interval=self._stream_interval,
            adapter=self._adapter,
        )
        log_file = self._log_file()
        try:
            self._process = ServerProcess(argv, environment(self._options), log_file, self._scratch)
        except OSError as error:
            do = "set engine.python to an interpreter that has SGLang, and engine.log_dir to a folder for its logs"
            raise self._unusable("the server's process cannot be started", error, do) from error
        self._client = Client(f"http://127.0.0.1:{port}", self._where, self._options.start_timeout_s)
        try:
            async with asyncio.timeout(self._options.start_timeout_s):
                await self._until_ready(self._process, name)
        except TimeoutError as error:
            tail = self._tail()
            await self._stop()
            raise EngineError(
                "the server did not become ready",
                expected=f"ready in {self._options.start_timeout_s:g} s",
                found=tail,
                where=self._where,
                do="read the log; raise engine.start_timeout_s if it was still loading or compiling",
            ) from error

    async def _until_ready(self, process: ServerProcess, name: str) -> None:
        """Until the process serves at its port; another server there, which took the port first, is not it."""
        while True:
            if process.exit_code is not None:
                raise EngineError(
                    "the server ended while it started",
                    found=f"exit code {process.exit_code}: {self._tail()}",
                    where=self._where,
                    do=f"read {process.log}" if process.log else "set engine.log_dir and try again",
                )
            try:
                info = await self.client.get("/model_info", timeout_s=5)
                if isinstance(info, dict) and info.get("served_model_name", name) == name:
                    await self.client.get("/health", timeout_s=30)
                    await asyncio.to_thread(process.note_files)
                    return
            except EngineError:
                pass  # not yet; the process or the deadline ends this
            await asyncio.sleep(POLL_S)

    def _unusable(self, message: str, error: OSError, do: str) -> EngineError:
        return EngineError(message, found=str(error), where=self._where, do=do)

    def _log_file(self) -> Path | None:
        folder = self._options.log_dir or self._context.log_dir
        if folder is None:
            return None
        path = Path(folder)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable("the folder of logs cannot be made", error, "set engine.log_dir") from error
        return path / f"{self._log_name}.log"

    async def _watch_over(self) -> None:
        """Bring the server back when its process ends or its health check fails, whether or not anybody asks for it."""
        while True:
            process, generation = self._process, self.generation
            if process is None:
                await asyncio.sleep(self._options.health_interval_s)
            else:
                try:
                    async with asyncio.timeout(self._options.health_interval_s):
                        await process.wait()
                except TimeoutError:
                    pass
            if self.failure is not None:
                return
            if not await self.alive() and self.generation == generation:
                try:
                    await self.revive(generation)
                except EngineError as error:
                    log.error("%s: %s", self._where, error)  # every request raises it too
                    return

    async def _stop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()
        process, self._process = self._process, None
        if process is not None:
            await process.stop()

    def lose(self, why: EngineLost) -> None:
        """Give the server up for good; every request raises `why` from now on."""
        self.health = Health.LOST
        self.failure = why
        self._on_up()  # those who wait for it must hear of it

    def _lose(self, message: str, expected: str, found: str) -> NoReturn:
        do = "read the engine's log; resume the run"
        why = EngineLost(message, expected=expected, found=found, where=self._where, do=do)
        self.lose(why)
        raise why

    def _tail(self) -> str:
        return self._process.tail().strip()[-800:] if self._process is not None else f"attached at {self._address}"


__all__ = ["Health", "Server", "ServerGone"]
