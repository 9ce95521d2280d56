"""The engine beside servers that misbehave, are somebody else's, or answer never: scripted ones over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from miles_core.errors import EngineError
from miles_core.kinds.engine import Chunk, EngineContext, GenerateRequest
from miles_core.testing.tiny import make_tiny_model
from miles_core.types import SamplingParams
from miles_sglang.claim import RELEASED
from miles_sglang.engine import SglangEngine
from miles_sglang.launch import LOADER
from miles_sglang.options import SglangOptions

LENGTH = {"type": "length", "length": 4}
DEADLINE_S = 60


class Peer:
    """A server that answers as SGLang does where a test does not say otherwise."""

    def __init__(self) -> None:
        self.info: Any = {
            "version": "0.5.21", "incremental_streaming_output": True, "context_length": 200,
            "custom_weight_loader": [LOADER],
        }  # fmt: skip
        self.version = "default"
        self.events: list[Any] | None = None
        """Of every request; None answers four tokens under the version served."""
        self.cuts = 0
        """Streams that break after their events, before others are whole."""
        self.asked: list[str] = []
        self.silent: set[str] = set()
        """Paths that are never answered."""
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.asked.append(path)
        if path in self.silent:
            await asyncio.sleep(3600)
        if path == "/generate":
            return await self._generate(request)
        if path == "/server_info":
            return web.json_response(self.info)
        if request.method == "POST":
            body = await request.json()
            self.version = body.get("weight_version", body.get("new_version", self.version))
        return web.json_response({"success": True, "message": "", "weight_version": self.version, "model_path": "/x"})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in [self.event([5, 6, 7, 8], LENGTH)] if self.events is None else self.events:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        if self.cuts:
            self.cuts -= 1
            assert request.transport is not None
            request.transport.abort()
            return response
        await response.write(b"data: [DONE]\n\n")
        return response

    def event(self, ids: list[int], finish: Any = None, *, logprob: float = -1.0, version: str | None = None) -> Any:
        meta = {
            "finish_reason": finish, "prompt_tokens": 3, "completion_tokens": len(ids), "cached_tokens": 0,
            "output_token_logprobs": [[logprob, token, None] for token in ids],
            "weight_versions": [{"start": 0, "end": 1000, "version": self.version if version is None else version}],
        }  # fmt: skip
        return {"output_ids": ids, "meta_info": meta}


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    found = Peer()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", found.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield found
    await runner.cleanup()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("peers") / "model", context=96)


def make(peer: Peer, model: Path, tmp_path: Path, **options: Any) -> SglangEngine:
    chosen = SglangOptions.model_validate({"urls": (peer.url,), "staging_dir": str(tmp_path), **options})
    return SglangEngine(chosen, EngineContext(model_path=str(model), context_length=None, device="cpu", seed=0))


@asynccontextmanager
async def attached(peer: Peer, model: Path, tmp_path: Path, **options: Any) -> AsyncIterator[SglangEngine]:
    async with asyncio.timeout(DEADLINE_S):
        engine = make(peer, model, tmp_path, **options)
        await engine.start()
        try:
            yield engine
        finally:
            await engine.close()


async def sample(engine: SglangEngine, limit: int = 4) -> list[Chunk]:
    params = SamplingParams(max_tokens=limit, temperature=1.0)
    request = GenerateRequest(request_id="r", token_ids=(3, 4, 5), params=params, session_id="s")
    return [chunk async for chunk in engine.generate(request)]


async def test_a_server_without_the_loader_is_not_asked_to_use_it(peer: Peer, model: Path, tmp_path: Path) -> None:
    peer.info["custom_weight_loader"] = []
    async with attached(peer, model, tmp_path) as engine:
        with pytest.raises(EngineError, match="--custom-weight-loader"):
            await engine.digests()
        with pytest.raises(EngineError, match="cannot tell which weights"):
            await engine.scramble(1)
    assert "/update_weights_from_tensor" not in peer.asked, "SGLang would have ended itself"


async def test_a_server_is_one_engines_until_it_leaves(peer: Peer, model: Path, tmp_path: Path) -> None:
    async with attached(peer, model, tmp_path) as first:
        before = list(peer.asked)
        with pytest.raises(EngineError, match=r"another engine of Miles uses this server(?s:.*)update_weight_version"):
            await make(peer, model, tmp_path).start()
        assert not set(peer.asked[len(before) :]) - {"/server_info", "/model_info"}, (
            "the refused one touched the server"
        )
        assert [chunk.weight_version for chunk in await sample(first)] == [-1, -1]
    assert peer.version == RELEASED
    async with attached(peer, model, tmp_path) as second:
        assert await second.version() == -1


async def test_a_claim_of_an_engine_that_has_ended_is_void(peer: Peer, model: Path, tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:  # noqa: ASYNC220 -- nothing waits for it
        began = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
        peer.version = f"miles/{socket.gethostname()}/{process.pid}/{began}/ab/7"
        with pytest.raises(EngineError, match=f"process {process.pid} .*version 7"):
            await make(peer, model, tmp_path).start()
        process.kill()
    async with attached(peer, model, tmp_path):
        pass
    peer.version = "miles/another.host/1/2/ab/7"
    with pytest.raises(EngineError, match=r"on another\.host"):
        await make(peer, model, tmp_path).start()


@pytest.mark.parametrize("version", ["41", "default", "miles/host/1/2/ab/-1"])
async def test_tokens_of_weights_of_others_are_refused(peer: Peer, model: Path, tmp_path: Path, version: str) -> None:
    async with attached(peer, model, tmp_path) as engine:
        peer.events = [peer.event([5, 6, 7, 8], LENGTH, version=version)]
        with pytest.raises(EngineError, match="this run did not publish"):
            await sample(engine)
