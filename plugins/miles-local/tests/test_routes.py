"""Recorded routes are those of an independent full forward, through batching, prefixes, preemption and new weights."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_core.kinds.engine import Chunk, EngineContext, GenerateRequest
from miles_core.testing.engine_oracle import PROMPTS, ask
from miles_core.testing.tiny_moe import CONFIGS, MOE_LAYERS, chosen_experts, make_model, save_model
from miles_core.types import UNRECORDED, FinishReason
from miles_local.engine import LocalEngine
from miles_local.options import LocalOptions

Found = tuple[list[int], np.ndarray[Any, Any]]
PROMPT = [1, *range(40, 60)]


def run(folder: Path, test: Callable[[LocalEngine], Awaitable[None]], *, routes: bool = True, **options: Any) -> None:
    async def whole() -> None:
        context = EngineContext(model_path=str(folder), context_length=None, device="cpu", seed=0, routes=routes)
        engine = LocalEngine(LocalOptions(**options), context)
        try:
            await engine.start()
            await test(engine)
        finally:
            await engine.close()

    asyncio.run(whole())


def routed(prompt: list[int], **params: Any) -> GenerateRequest:
    return replace(ask(prompt, **params), routes=True)


async def finish(stream: Any, taken: list[Chunk] | None = None) -> tuple[list[int], Chunk]:
    chunks = [*(taken or []), *[chunk async for chunk in stream]]
    return [token for chunk in chunks for token in chunk.token_ids], chunks[-1]


async def answer(engine: LocalEngine, request: GenerateRequest) -> Found:
    """The whole row and its routes."""
    ids, last = await finish(engine.generate(request))
    assert last.routes is not None
    return [*request.token_ids, *ids], last.routes


def expected(name: str, row: list[int], seed: int = 0) -> np.ndarray[Any, Any]:
    return chosen_experts(make_model(name, seed=seed), row[:-1])


@pytest.mark.parametrize("name", CONFIGS)
def test_routes_are_those_of_a_full_forward(name: str, tmp_path: Path) -> None:
    async def test(engine: LocalEngine) -> None:
        requests = [routed(p, name=str(i), max_tokens=4 + 4 * i, seed=i) for i, p in enumerate(PROMPTS)]
        for row, routes in await asyncio.gather(*(answer(engine, request) for request in requests)):
            assert routes.dtype == np.int16
            assert routes.shape == (len(row) - 1, MOE_LAYERS.get(name, 3), 2)
            np.testing.assert_array_equal(np.sort(routes), np.sort(expected(name, row)))

    run(save_model(name, tmp_path), test, max_batch_size=3, prefill_tokens=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen3-moe", tmp_path_factory.mktemp("moe"))


def test_reused_prefixes_bring_the_rows_that_made_them(folder: Path) -> None:
    async def test(engine: LocalEngine) -> None:
        row, routes = await answer(engine, routed(PROMPT, session="s", name="1", max_tokens=10, seed=1))
        again, later = await answer(engine, routed([*row, 7, 8, 9], session="s", name="2", max_tokens=6, seed=2))
        assert (await engine.stats())["cached_tokens"] >= len(row) - 1
        np.testing.assert_array_equal(later[: len(routes)], routes)
        np.testing.assert_array_equal(np.sort(later), np.sort(expected("qwen3-moe", again)))

    run(folder, test)


def test_members_of_a_group_share_a_prefix_and_its_routes(folder: Path) -> None:
    async def test(engine: LocalEngine) -> None:
        requests = [routed(PROMPT, name=str(i), max_tokens=8, seed=i) for i in range(4)]
        for row, routes in await asyncio.gather(*(answer(engine, request) for request in requests)):
            np.testing.assert_array_equal(np.sort(routes), np.sort(expected("qwen3-moe", row)))
        assert (await engine.stats())["tokens_prefilled"] < 2 * len(PROMPT)

    run(folder, test)


def test_a_pause_in_place_loses_no_row(folder: Path) -> None:
    async def test(engine: LocalEngine) -> None:
        async with aclosing(engine.generate(routed(PROMPT, max_tokens=30, seed=3))) as stream:
            first = await anext(stream)
            await engine.pause("in-place")
            await engine.resume()
            ids, last = await finish(stream, [first])
        assert last.routes is not None
        np.testing.assert_array_equal(np.sort(last.routes), np.sort(expected("qwen3-moe", [*PROMPT, *ids])))

    run(folder, test)


def test_an_abort_returns_the_rows_so_far(folder: Path) -> None:
    async def test(engine: LocalEngine) -> None:
        async with aclosing(engine.generate(routed(PROMPT, max_tokens=30, seed=3))) as stream:
            first = await anext(stream)
            await engine.pause("abort")
            ids, last = await finish(stream, [first])
        assert last.finish_reason is FinishReason.ABORT
        row = [*PROMPT, *ids]
        assert last.routes is not None
        assert len(last.routes) == len(row) - 1
        known = (last.routes != UNRECORDED).all(axis=(1, 2))
        assert known[: len(PROMPT)].all()
        np.testing.assert_array_equal(np.sort(last.routes[known]), np.sort(expected("qwen3-moe", row)[known]))

    run(folder, test)
