"""The engine beside servers that misbehave, are somebody else's, or answer never: scripted ones over real sockets."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from miles_core.errors import EngineError, EngineLost
from miles_core.kinds.engine import Chunk, EngineContext, GenerateRequest
from miles_core.restarts import RestartBudget
from miles_core.testing.tiny import make_tiny_model
from miles_core.types import SamplingParams
from miles_sglang.attempt import BARREN
from miles_sglang.claim import RELEASED, here
from miles_sglang.engine import SglangEngine
from miles_sglang.launch import LOADER
from miles_sglang.options import SglangOptions

LENGTH = {"type": "length", "length": 4}
DEADLINE_S = 60


RECORDED = json.loads((Path(__file__).parent / "recorded" / "controls.json").read_text())


class Peer:
    """A server that answers as SGLang did where a test does not say otherwise."""

    def __init__(self) -> None:
        self.info: Any = {
            "version": "0.5.21", "incremental_streaming_output": True, "context_length": 200,
            "custom_weight_loader": [LOADER],
        }  # fmt: skip
        self.version = "default"
        self.model: dict[str, Any] = {"model_path": "/elsewhere", "architectures": None}
        self.events: list[Any] | None = None
        """Of every request; None answers four tokens under the version served."""
        self.cuts = 0
        """Streams that break after their events, before others are whole."""
        self.asked: list[str] = []
        self.sessions: dict[str, float] = {}
        """Open ones, and when they end by themselves."""
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
        if path in ("/open_session", "/close_session"):
            return self._session(path, await request.json())
        if request.method == "POST":
            body = await request.json()
            self.version = body.get("weight_version", body.get("new_version", self.version))
        recorded = RECORDED["answers"].get(f"{request.method} {path}")
        if not isinstance(recorded, dict):
            return web.Response(text=recorded)
        return web.json_response({**recorded, "weight_version": self.version, **self.model})

    def _session(self, path: str, body: Any) -> web.Response:
        now, name = time.monotonic(), body["session_id"]
        self.sessions = {each: end for each, end in self.sessions.items() if end > now}
        if path == "/close_session":
            self.sessions.pop(name, None)
            return web.Response()
        if name in self.sessions:
            refusal = RECORDED["refusals"][f"POST {path}"]
            return web.json_response(refusal["answer"], status=refusal["status"])
        self.sessions[name] = now + body["timeout"]
        return web.json_response(name)

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

    def event(self, ids: list[int], finish: Any = None, *, logprob: Any = -1.0, version: str | None = None) -> Any:
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
        with pytest.raises(EngineError, match=r"another engine of Miles uses this server"):
            await make(peer, model, tmp_path).start()
        assert not set(peer.asked[len(before) :]) - {"/server_info", "/model_info"}, (
            "the refused one touched the server"
        )
        assert [chunk.weight_version for chunk in await sample(first)] == [-1, -1]
    assert peer.version == RELEASED
    async with attached(peer, model, tmp_path) as second:
        assert await second.version() == -1


async def test_a_claim_of_this_host_is_void_when_its_process_has_ended(peer: Peer, model: Path, tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:  # noqa: ASYNC220 -- nothing waits for it
        began = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
        peer.version = f"miles/{here()}/{process.pid}/{began}/ab/7"
        with pytest.raises(EngineError, match=f"process {process.pid} .*version 7"):
            await make(peer, model, tmp_path).start()
        assert peer.sessions == {}
        process.kill()
    async with attached(peer, model, tmp_path):
        pass


async def test_what_a_dead_run_of_another_host_left_is_void_when_its_lease_has_ended(
    peer: Peer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miles_sglang.claim.REST_S", 0.05)
    peer.version = "miles/another.host+0/1/2/ab/7"
    peer.sessions["miles/another.host+0/1/2/ab/lease-1"] = time.monotonic() + 0.3
    async with attached(peer, model, tmp_path) as engine:
        ours = {f"{engine._claim.owner}/lease-{turn}" for turn in (0, 1)}
        assert ours & peer.sessions.keys()
        assert [chunk.token_ids for chunk in await sample(engine)] == [(5, 6, 7, 8), ()]
    assert not ours & peer.sessions.keys()


async def test_an_engine_whose_server_was_taken_is_lost_and_touches_it_no_more(
    peer: Peer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miles_sglang.claim.RENEW_S", 0.01)
    monkeypatch.setattr("miles_sglang.claim.AGAIN_S", 0.01)
    async with attached(peer, model, tmp_path) as engine:
        peer.version, peer.sessions = "miles/another.host+0/1/2/ab/3", {}
        while engine._server.failure is None:  # noqa: ASYNC110 -- looks from outside
            await asyncio.sleep(0.01)
        loads = peer.asked.count("/update_weights_from_disk")
        with pytest.raises(EngineLost, match=r"has taken this server(?s:.*)another\.host, its version 3"):
            await sample(engine)
        with pytest.raises(EngineLost):
            await engine.version()
        with pytest.raises(EngineError):
            await engine._swap(tmp_path, 0)
        assert peer.asked.count("/update_weights_from_disk") == loads
    assert peer.version.startswith("miles/another.host"), "it gave away what is not its own"


@pytest.mark.parametrize("version", ["41", "default", "miles/host/1/2/ab/-1"])
async def test_tokens_of_weights_of_others_are_refused(peer: Peer, model: Path, tmp_path: Path, version: str) -> None:
    async with attached(peer, model, tmp_path) as engine:
        peer.events = [peer.event([5, 6, 7, 8], LENGTH, version=version)]
        with pytest.raises(EngineError, match="this run did not publish"):
            await sample(engine)


ABORTED = {"type": "abort", "message": "x"}


@pytest.mark.parametrize(
    ("finish", "error"), [(ABORTED, "again and again without a token"), (None, "without a finish")]
)
async def test_a_server_that_ends_requests_at_once_is_not_flooded(
    peer: Peer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finish: Any, error: str
) -> None:
    monkeypatch.setattr("miles_sglang.attempt.REST_S", 1e-4)
    async with attached(peer, model, tmp_path) as engine:
        peer.events = [peer.event([], finish)]
        with pytest.raises(EngineError, match=error):
            await sample(engine)
        assert peer.asked.count("/generate") <= BARREN + 1
        peer.events = None
        assert [chunk.token_ids for chunk in await sample(engine)] == [(5, 6, 7, 8), ()]


async def test_a_connection_that_breaks_is_not_a_server_that_died(
    peer: Peer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miles_sglang.attempt.REST_S", 1e-4)
    async with attached(peer, model, tmp_path, restarts=0) as engine:
        loads = peer.asked.count("/update_weights_from_disk")
        peer.events, peer.cuts = [peer.event([5])], 5
        chunks = await sample(engine, 5)
        assert [token for chunk in chunks for token in chunk.token_ids] == [5] * 5
        assert (await engine.stats())["server_starts"] == 1
        peer.events, peer.cuts = [], 1000
        with pytest.raises(EngineError, match="again and again"):
            await sample(engine)
        peer.events, peer.cuts = None, 0
        await asyncio.gather(*(sample(engine) for _ in range(5)))
        assert peer.asked.count("/update_weights_from_disk") == loads, "its weights were loaded again"


async def test_restarts_count_within_the_window_only_and_then_the_engine_is_lost(
    peer: Peer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("miles_sglang.server.RestartBudget", partial(RestartBudget, clock=lambda: now))
    async with attached(peer, model, tmp_path, restarts=2, restarts_within_s=100.0) as engine:
        server = engine._server
        for _ in range(6):
            await server.revive(server.generation)
            now += 50.0
        await server.revive(server.generation)
        assert (await engine.stats())["server_starts"] == 8
        now += 49.0
        with pytest.raises(EngineLost, match=r"failed too often(?s:.*)at most 2 within 100 s"):
            await server.revive(server.generation)
        with pytest.raises(EngineLost):  # so that whoever asks finds it lost, and the run can replace it
            await engine.version()
        with pytest.raises(EngineLost):
            await sample(engine)


async def test_a_thousandth_broken_connection_asks_no_question_of_its_own(
    peer: Peer, model: Path, tmp_path: Path
) -> None:
    async with attached(peer, model, tmp_path, restarts=0) as engine:
        await asyncio.gather(*(engine._server.mend(1) for _ in range(50)))
    assert peer.asked.count("/health") <= 2


@pytest.mark.parametrize(
    ("ids", "changes", "error"),
    [
        ([*range(5, 40)], {}, "too long"),
        ([5], {}, "ended early"),
        ([5, 6, 7, 99999], {}, "asked for: token ids"),
        ([5, 6, 7, -1], {}, "asked for: token ids"),
        ([5, 6, 7, 8], {"logprob": 3.5}, "at most 0"),
        ([5, 6, 7, 8], {"logprob": "-1"}, "no numbers"),
    ],
)
async def test_a_reply_that_no_request_asked_for_is_told(
    peer: Peer, model: Path, tmp_path: Path, ids: list[int], changes: dict[str, Any], error: str
) -> None:
    async with attached(peer, model, tmp_path) as engine:
        peer.events = [peer.event(ids, LENGTH, **changes)]
        with pytest.raises(EngineError, match=error):
            await sample(engine)


JUNK: tuple[Any, ...] = (None, "x", [], {}, -1, 10**12, 1.5, [[]], [None], {"a": 1})


async def test_junk_in_a_reply_is_told_with_engine_and_request_or_does_not_matter(
    peer: Peer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every field in turn. What passes is all of the request's tokens."""
    monkeypatch.setattr("miles_sglang.attempt.REST_S", 1e-5)
    async with attached(peer, model, tmp_path) as engine:
        good = peer.event([5, 6, 7, 8], LENGTH)
        entries, spans = ("meta_info", "output_token_logprobs"), ("meta_info", "weight_versions")
        fields: list[tuple[Any, ...]] = [("output_ids",), ("output_ids", 1), ("meta_info",), (*spans, 0), (*entries, 1)]
        fields += [("meta_info", name) for name in good["meta_info"]]
        fields += [(*spans, 0, name) for name in ("start", "end", "version")]
        fields += [(*entries, 1, 0), (*entries, 1, 1), ("meta_info", "finish_reason", "type")]
        for field, junk in itertools.product(fields, JUNK):
            event = copy.deepcopy(good)
            inner = event
            for name in field[:-1]:
                inner = inner[name]
            inner[field[-1]] = junk
            peer.events = [event]
            (found,) = await asyncio.gather(sample(engine), return_exceptions=True)
            if isinstance(found, BaseException):
                assert isinstance(found, EngineError), (field, junk)
                assert "engine sglang 0" in str(found)
                assert found.do is not None, (field, junk)
            else:
                assert [token for chunk in found for token in chunk.token_ids] == [5, 6, 7, 8], (field, junk)


async def test_tokens_without_a_version_are_refused(peer: Peer, model: Path, tmp_path: Path) -> None:
    async with attached(peer, model, tmp_path) as engine:
        event = peer.event([5, 6, 7, 8], LENGTH)
        del event["meta_info"]["weight_versions"]
        peer.events = [event]
        with pytest.raises(EngineError, match=r"which weights made its tokens(?s:.*)engine sglang 0, request r"):
            await sample(engine)


@pytest.mark.parametrize("info", [None, [1, 2], "<html>"])
async def test_what_is_no_sglang_is_told(peer: Peer, model: Path, tmp_path: Path, info: Any) -> None:
    peer.info = info
    with pytest.raises(EngineError, match="no SGLang"):
        await make(peer, model, tmp_path).start()


async def test_an_update_that_is_never_answered_ends(peer: Peer, model: Path, tmp_path: Path) -> None:
    async with attached(peer, model, tmp_path, health_interval_s=20, restarts=1) as engine:
        engine._server.client._patience_s = 0.5
        engine._server._options = engine._server._options.model_copy(update={"start_timeout_s": 0.5})
        peer.silent = {"/update_weights_from_disk"}
        with pytest.raises(EngineError, match=r"could not be brought back(?s:.*)was not answered"):
            await engine._swap(tmp_path, 0)


async def test_a_server_of_another_size_is_refused_before_weights_enter_it(
    peer: Peer, model: Path, tmp_path: Path
) -> None:
    peer.model["model_path"] = str(make_tiny_model(tmp_path / "other", context=96, layers=4))
    with pytest.raises(EngineError, match=r"another model(?s:.*)4 layers"):
        await make(peer, model, tmp_path).start()
    assert "/update_weights_from_disk" not in peer.asked
    peer.model["model_path"] = str(model)
    async with attached(peer, model, tmp_path):
        pass


async def test_what_is_staged_beside_an_attached_server_goes_when_miles_is_killed(
    peer: Peer, model: Path, tmp_path: Path
) -> None:
    async with attached(peer, model, tmp_path) as engine:
        guard = engine._server._guard
        assert guard is not None
        assert engine._store.root.is_dir()
        pipe = guard._process.stdin
        assert pipe is not None
        pipe.close()  # as the death of this process would
        await asyncio.to_thread(guard._process.wait, DEADLINE_S)
        assert not engine._store.root.exists()
    async with attached(peer, model, tmp_path) as engine:
        guard = engine._server._guard
    assert guard is not None
    assert guard._process.returncode is not None, "the guard outlives its engine"
