"""Teacher `sglang`: the kit and an oracle against a real server; answers that are no scores from a loopback one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from miles_core.errors import EngineError
from miles_core.kinds.engine import EngineContext
from miles_core.kinds.teacher import Teacher
from miles_core.testing.engine_oracle import CONTEXT, Models, logprobs_of, make_models
from miles_core.testing.teacher import TeacherConformance, row
from miles_core.testing.tiny import make_tiny_model
from miles_core.types import Float32
from miles_sglang.engine import SglangEngine
from miles_sglang.options import SglangOptions, TeacherOptions
from miles_sglang.teacher import SglangTeacher

FLOAT: dict[str, Any] = {"dtype": "float32"}
IDS = (1, 20, 33, 47, 5, 60, 2, 91)


@asynccontextmanager
async def closing(options: TeacherOptions) -> AsyncIterator[SglangTeacher]:
    teacher = SglangTeacher(options)
    try:
        yield teacher
    finally:
        await teacher.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.getbasetemp())


@pytest.fixture
def serving(seeded: Any, models: Models) -> str:
    """The address of the shared server, with the first model in it."""

    async def load() -> None:
        options = SglangOptions(urls=(seeded.url,), dtype="float32", deterministic=True)
        context = EngineContext(model_path=str(models.served), context_length=None, device="cpu", seed=0)
        engine = SglangEngine(options, context)
        await engine.start()
        await engine.close()

    asyncio.run(load())
    found: str = seeded.url
    return found


@pytest.mark.sglang
class TestAttached(TeacherConformance):
    @pytest.fixture(autouse=True)
    def _server(self, serving: str, models: Models) -> None:
        self.options = TeacherOptions(model=str(models.served), url=serving, dtype="float32")

    def make(self, tmp_path: Path) -> Teacher:
        return SglangTeacher(self.options)


@pytest.mark.sglang
async def test_scores_are_those_of_a_full_forward_and_of_this_model_alone(serving: str, models: Models) -> None:
    longest = tuple(int(i) for i in np.random.default_rng(0).integers(3, 90, size=CONTEXT))
    async with asyncio.timeout(120), closing(TeacherOptions(model=str(models.served), url=serving, **FLOAT)) as teacher:
        for ids in (IDS, longest):
            scores = await teacher.score(row(ids))
            assert np.isnan(scores[0])
            np.testing.assert_allclose(scores[1:], logprobs_of(models.served, list(ids[:1]), list(ids[1:])), atol=1e-5)
        # A run that publishes to the teacher's server is told of, not scored with.
        body = {"model_path": str(models.published), "weight_version": "4", "flush_cache": True}
        await teacher._server.client.post("/update_weights_from_disk", body)
        with pytest.raises(EngineError, match=r"(?s)weights changed.*version released throughout.*4"):
            await teacher.score(row(IDS))
    async with asyncio.timeout(120), closing(TeacherOptions(model=str(models.served), url=serving, **FLOAT)) as teacher:
        with pytest.raises(EngineError, match=r"serves other weights than it should(?s:.*)embed_tokens"):
            await teacher.score(row(IDS))


@pytest.mark.sglang
@pytest.mark.slow
async def test_a_server_of_its_own_is_started_brought_back_and_ended(
    cpu_options: dict[str, object], models: Models
) -> None:
    options = TeacherOptions.model_validate({**cpu_options, "model": str(models.served), "device": "cpu"})
    expected = logprobs_of(models.served, list(IDS[:1]), list(IDS[1:]))
    async with asyncio.timeout(900), closing(options) as teacher:
        np.testing.assert_allclose((await teacher.score(row(IDS)))[1:], expected, atol=1e-5)
        process = teacher._server.process
        assert process is not None
        process.kill()
        np.testing.assert_allclose((await teacher.score(row(IDS)))[1:], expected, atol=1e-5)
    assert teacher._server.process is None


# --- without SGLang ---------------------------------------------------------------------------------------------------

INFO = {"version": "0.5.21", "tp_size": 1, "dp_size": 1, "context_length": 4096, "dtype": "float32"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("teacher") / "model", context=16, dtype="float32")


def good(ids: tuple[int, ...]) -> dict[str, Any]:
    entries = [[None if at == 0 else -1.0 - at, token, None] for at, token in enumerate(ids)]
    return {"text": "", "output_ids": [], "meta_info": {"weight_version": "default", "input_token_logprobs": entries}}


async def ask(model: Path, answer: Any, ids: tuple[int, ...] = IDS, **info: Any) -> Float32:
    """A score from a server that gives this answer to every row."""

    async def known(request: web.Request) -> web.Response:
        told: dict[str, Any] = {"/server_info": {**INFO, **info}, "/model_info": {"weight_version": "default", **info}}
        return web.json_response(told.get(request.path, answer))

    app = web.Application()
    app.add_routes([web.route("*", "/{path:.*}", known)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with asyncio.timeout(60), closing(TeacherOptions(model=str(model), url=url, **FLOAT)) as teacher:
            return await teacher.score(row(ids))
    finally:
        await runner.cleanup()


async def test_an_answer_is_read_into_scores(model: Path) -> None:
    scores = await ask(model, good(IDS))
    assert scores.dtype == np.float32
    np.testing.assert_array_equal(scores, [np.nan, *(-1.0 - at for at in range(1, len(IDS)))])


def spoilt(**meta: Any) -> dict[str, Any]:
    return {"meta_info": {**good(IDS)["meta_info"], **meta}}


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (good(IDS[:-1]), "scored other tokens"),
        (good((*IDS[:-1], 3)), "scored other tokens"),
        (spoilt(weight_version="7"), "weights changed"),
        (spoilt(input_token_logprobs=[[None, token, None] for token in IDS]), "not finite"),
        (spoilt(input_token_logprobs=None), "is no score"),
        ({"text": "hello"}, "is no score"),
        ("<html>", "is no score"),
        ([], "is no score"),
    ],
)
async def test_an_answer_that_is_no_score_of_the_row_is_refused(model: Path, answer: Any, named: str) -> None:
    with pytest.raises(EngineError, match=named):
        await ask(model, answer)


async def test_rows_and_servers_that_do_not_fit_are_refused(model: Path) -> None:
    with pytest.raises(EngineError, match="outside the vocabulary"):
        await ask(model, good(IDS), (1, 2, 10**6))
    with pytest.raises(EngineError, match="does not fit the context"):
        await ask(model, good(IDS), tuple(range(3, 20)))
    with pytest.raises(EngineError, match=r"--dtype=float32"):
        await ask(model, good(IDS), dtype="bfloat16")
    with pytest.raises(EngineError, match=r"serves another model"):
        await ask(model, good(IDS), architectures=["BertModel"])
    with pytest.raises(EngineError, match=r"longer than the checkpoint"):
        SglangTeacher(TeacherOptions(model=str(model), context_length=17))
