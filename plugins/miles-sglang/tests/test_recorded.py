"""What a real server answered, read without one; and the same requests asked again, so that the files cannot drift.

`MILES_RECORD=1 pytest plugins/miles-sglang/tests/test_recorded.py -m sglang` writes the files anew.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web

import miles_sglang
from miles_core.errors import EngineError
from miles_core.kinds.engine import EngineContext
from miles_core.testing.engine_oracle import CONTEXT, Feed, make_models, publish
from miles_core.testing.teacher import row
from miles_core.testing.tiny import make_tiny_model
from miles_core.types import FinishReason
from miles_sglang.attempt import Attempt
from miles_sglang.checkpoint import Checkpoint, read_checkpoint
from miles_sglang.client import Client, _message
from miles_sglang.dialect import Dialect
from miles_sglang.engine import SglangEngine
from miles_sglang.lease import TAKING
from miles_sglang.options import SglangOptions, TeacherOptions
from miles_sglang.server import Server
from miles_sglang.settings import fit_problems, sampling_problems
from miles_sglang.teacher import SglangTeacher


def _exchanges() -> Any:
    path = Path(__file__).parent / "support" / "exchanges.py"
    spec = importlib.util.spec_from_file_location("miles_sglang_exchanges", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


ex = _exchanges()
SETTINGS = (
    "version", "incremental_streaming_output", "enable_return_routed_experts", "enable_deterministic_inference",
    "tp_size", "dp_size", "context_length", "max_total_num_tokens", "dtype", "skip_tokenizer_init",
    "speculative_algorithm", "quantization", "preferred_sampling_params", "disaggregation_mode",
)  # fmt: skip
"""Of GET /server_info, what the plugin reads."""
MODEL = ("model_path", "served_model_name", "architectures", "weight_version")
"""Of GET /model_info."""
SESSION = {"session_id": TAKING, "capacity_of_str_len": 0, "timeout": 600.0}
REFUSED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/open_session", SESSION),
    ("/end_weight_update", {}),
    ("/update_weights_from_tensor", {"serialized_named_tensors": []}),
    ("/update_weights_from_disk", {"model_path": "/nowhere/at/all"}),
    ("/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere/at/all"}),
    ("/unload_lora_adapter", {"lora_name": "a"}),
)
"""What the server refuses an engine that is attached; it is not started for adapters."""
ANSWERED = [name for name in ex.CASES if name != "refused"]
SOURCE = Path(miles_sglang.__file__).parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("recorded") / "model", seed=0, context=CONTEXT)


@pytest.fixture(scope="module")
def checkpoint(model: Path) -> Checkpoint:
    return read_checkpoint(model, "float32")


@asynccontextmanager
async def replaying(recorded: dict[str, Any], aborted: list[str]) -> AsyncIterator[Client]:
    """A client of a loopback server that answers what was recorded, over real sockets."""

    async def generate(_: web.Request) -> web.StreamResponse:
        if recorded["status"] != 200:
            return web.json_response(recorded["answer"], status=recorded["status"])
        lines = "".join(f"data: {json.dumps(event)}\n\n" for event in recorded["events"]) + "data: [DONE]\n\n"
        return web.Response(text=lines, content_type="text/event-stream")

    async def abort(request: web.Request) -> web.Response:
        aborted.append((await request.json())["rid"])
        return web.Response()

    app = web.Application()
    app.add_routes([web.post("/generate", generate), web.post("/abort_request", abort)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    client = Client(f"http://127.0.0.1:{runner.addresses[0][1]}", "replay")
    try:
        yield client
    finally:
        await client.close()
        await runner.cleanup()


class Replayed:
    """The part of a server that an attempt uses."""

    def __init__(self, client: Client) -> None:
        self.client = client


def _number(name: object) -> int:
    return int(str(name))


async def _chunks(name: str, checkpoint: Checkpoint, aborted: list[str]) -> tuple[list[Any], Any]:
    row = ex.CASES[name].row(name)
    async with asyncio.timeout(30), replaying(ex.load(name)["answer"], aborted) as client:
        attempt = Attempt(row, cast("Server", Replayed(client)), checkpoint, lambda: 0, _number, 2, "replay")
        chunks: list[Any] = []
        assert await attempt.run(-1, chunks.append)
        return chunks, row


@pytest.mark.parametrize("name", ex.CASES)
def test_requests_are_written_as_they_were_recorded(name: str, checkpoint: Checkpoint) -> None:
    assert ex.CASES[name].body(name, checkpoint) == ex.load(name)["request"]


@pytest.mark.parametrize("name", ANSWERED)
def test_a_recorded_answer_is_read_whole(name: str, checkpoint: Checkpoint) -> None:
    aborted: list[str] = []
    chunks, row = asyncio.run(_chunks(name, checkpoint, aborted))
    recorded = ex.load(name)["answer"]
    sampled = [token for chunk in chunks for token in chunk.token_ids]
    assert sampled == ex.ids(recorded)
    assert [value for chunk in chunks for value in chunk.logprobs] == ex.logprobs(recorded)
    assert row.ids == [*ex.CASES[name].already, *sampled]
    assert {chunk.weight_version for chunk in chunks} == {-1}
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason is (FinishReason.STOP if name == "stopped" else FinishReason.LENGTH)
    assert len(chunks) > 2, "it was streamed"
    assert aborted == []


def test_a_recorded_refusal_is_told_in_the_servers_words(checkpoint: Checkpoint) -> None:
    with pytest.raises(EngineError, match=r"longer than the model's context length"):
        asyncio.run(_chunks("refused", checkpoint, []))


def test_recorded_settings_are_those_of_a_server_for_this_run(model: Path) -> None:
    info = ex.load("server_info")["answer"]
    context = EngineContext(model_path=str(model), context_length=None, device="cpu", seed=0)
    fitting = SglangOptions(dtype="float32", deterministic=True)
    wrong = SglangOptions(dtype="bfloat16")
    assert [*fit_problems(info, fitting, CONTEXT), *sampling_problems(info, fitting, context)] == []
    assert len([*fit_problems(info, wrong, CONTEXT), *sampling_problems(info, wrong, context)]) == 2
    assert str(Dialect.of(info["version"], "recorded").version) == ex.load("server_info")["sglang"]


@pytest.mark.sglang
def test_the_live_server_answers_as_recorded(seeded: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = make_models(tmp_path_factory.getbasetemp()).served
    checkpoint = read_checkpoint(folder, "float32")

    async def ask() -> dict[str, Any]:
        # An engine that attaches loads the checkpoint, and so names the version.
        options = SglangOptions(urls=(seeded.url,), dtype="float32", deterministic=True)
        engine = SglangEngine(options, EngineContext(model_path=str(folder), context_length=None, device="cpu", seed=0))
        client = Client(seeded.url, "live")
        async with asyncio.timeout(240):
            await engine.start()
            try:
                info = await client.get("/server_info", timeout_s=60)
                found = {"server_info": {"answer": {name: info.get(name) for name in SETTINGS}}}
                for name, case in ex.CASES.items():
                    body = case.body(name, checkpoint)
                    found[name] = {"request": body, "answer": await ex.exchange(seeded.url, body)}
            finally:
                await client.close()
                await engine.close()
        return {name: {"sglang": info["version"], **content} for name, content in found.items()}

    live = asyncio.run(ask())
    if os.environ.get("MILES_RECORD"):
        for name, content in live.items():
            ex.save(name, content)
    for name, found in live.items():
        kept = ex.load(name)
        assert found["sglang"] == kept["sglang"], "recorded from another release: MILES_RECORD=1 records anew"
        assert ex.shape(found["answer"].get("events", [found["answer"]])[-1]) == ex.shape(
            kept["answer"].get("events", [kept["answer"]])[-1]
        )
        if name in ANSWERED:
            _same(found["answer"], kept["answer"])
    assert live["refused"]["answer"] == ex.load("refused")["answer"]
    assert live["server_info"]["answer"] == ex.load("server_info")["answer"]


# --- all other endpoints ----------------------------------------------------------------------------------------------


def test_every_endpoint_in_use_is_recorded() -> None:
    used = {path for file in SOURCE.glob("*.py") for path in re.findall(r'"(/[a-z]+(?:_[a-z]+)*)"', file.read_text())}
    kept = ex.load("controls")
    recorded = {key.split()[1] for part in ("answers", "refusals") for key in kept[part]}
    assert used - {"/proc"} == recorded


def test_refusals_are_told_in_the_servers_words() -> None:
    for key, refusal in ex.load("controls")["refusals"].items():
        assert refusal["status"] == 400
        told = _message(json.dumps(refusal["answer"]))
        assert not told.startswith("{"), key
        assert "still open" in told or key != "POST /open_session", "the lease goes by these words"


@pytest.mark.sglang
def test_the_live_server_answers_an_engine_as_recorded(
    seeded: Any, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine does all it can do; what it was answered first at each endpoint has the form that is kept."""
    models = make_models(tmp_path_factory.getbasetemp())
    found: dict[str, Any] = {"sglang": "", "answers": {}, "refusals": {}}
    ask, refused = Client._ask, Client._refused

    async def record(self: Client, method: str, path: str, *args: Any) -> Any:
        answer = await ask(self, method, path, *args)
        found["sglang"] = answer["version"] if path == "/server_info" else found["sglang"]
        read = {"/server_info": SETTINGS, "/model_info": MODEL}.get(path)
        found["answers"].setdefault(
            f"{method} {path}", {name: answer.get(name) for name in read} if read is not None else answer
        )
        return answer

    def record_refusal(self: Client, method: str, path: str, status: int, text: str) -> EngineError:
        found["refusals"].setdefault(f"{method} {path}", {"status": status, "answer": json.loads(text)})
        return refused(self, method, path, status, text)

    async def use_all() -> None:
        context = EngineContext(model_path=str(models.served), context_length=None, device="cpu", seed=0)
        for update in ("tensor", "distributed", "disk"):
            options = SglangOptions(urls=(seeded.url,), dtype="float32", deterministic=True, update=update)
            engine, feed = SglangEngine(options, context), Feed()
            await engine.start()
            await engine.open_receiver(lambda feed=feed: feed)  # type: ignore[misc]
            await publish(engine, feed, models.served, 0)
            assert await engine._server.alive()
            client = engine._server.client
            await client.post("/open_session", SESSION)
            for path, body in REFUSED:
                with pytest.raises(EngineError):
                    await client.post(path, body)
            await client.post("/close_session", SESSION)
            await engine.close()
        teacher = SglangTeacher(TeacherOptions(model=str(models.served), url=seeded.url, dtype="float32"))
        await teacher.score(row((1, 20, 33, 47)))
        await teacher.close()

    monkeypatch.setattr(Client, "_ask", record)
    monkeypatch.setattr(Client, "_refused", record_refusal)
    asyncio.run(asyncio.wait_for(use_all(), 240))
    plain = json.loads(re.sub(r'"/[^"]*/[^"]*"', '"/folder"', json.dumps(found)))
    if os.environ.get("MILES_RECORD"):
        ex.save("controls", plain)
    kept = ex.load("controls")
    for part in ("answers", "refusals"):
        assert plain[part].keys() == kept[part].keys()
        for key, answer in plain[part].items():
            assert ex.shape(answer) == ex.shape(kept[part][key]), key
    assert plain["sglang"] == kept["sglang"], "recorded from another release: MILES_RECORD=1 records anew"


def _same(found: dict[str, Any], kept: dict[str, Any]) -> None:
    """What does not depend on the machine: tokens, log-probs within rounding, counts, versions, the reason of the end.
    Where events are cut does depend on it, and so do times and what was cached."""
    assert ex.ids(found) == ex.ids(kept)
    assert ex.logprobs(found) == pytest.approx(ex.logprobs(kept), abs=1e-4)
    assert ex.shape(found["events"][0]) == ex.shape(kept["events"][0])
    last, before = found["events"][-1]["meta_info"], kept["events"][-1]["meta_info"]
    for name in ("id", "finish_reason", "prompt_tokens", "completion_tokens"):
        assert last[name] == before[name], name
    assert [(span["start"], span["end"]) for span in last["weight_versions"]] == [
        (span["start"], span["end"]) for span in before["weight_versions"]
    ], "versions have the name of who gave them"
