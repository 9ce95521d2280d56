"""The part of the engine kit about expert routes (tag `records-routes`): those of an independent full forward."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_core.errors import MilesError
from miles_core.kinds.engine import Chunk, Engine, GenerateRequest
from miles_core.testing.engine_oracle import CONTEXT, PROMPTS, Models, ask, publish
from miles_core.testing.engine_pauses import ServingKit
from miles_core.testing.tiny import make_tiny_model
from miles_core.testing.tiny_moe import chosen_experts

LAYERS, TOP_K = 2, 2
PROMPT = [1, *range(40, 60)]


@functools.cache
def make_expert_models(folder: Path) -> Models:
    """Two mixtures of experts that differ in weights alone; made once for all tests that share a folder."""
    first, second = (
        make_tiny_model(folder / f"experts-{seed}", seed=seed, architecture="qwen3-moe", context=CONTEXT, tie=False)
        for seed in (0, 1)
    )
    return Models(first, second)


@functools.cache
def _model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


def expected_routes(folder: Path, row: Sequence[int]) -> np.ndarray[Any, Any]:
    """i64[T-1, L, K], each set sorted."""
    return np.sort(chosen_experts(_model(folder), list(row)[:-1]))


def routed(prompt: Sequence[int], **params: Any) -> GenerateRequest:
    return replace(ask(prompt, **params), routes=True)


async def routes_of(engine: Engine, request: GenerateRequest) -> tuple[list[int], np.ndarray[Any, Any]]:
    """The whole row, and its routes with each set sorted."""
    return joined(request, [chunk async for chunk in engine.generate(request)])


def joined(request: GenerateRequest, chunks: Sequence[Chunk]) -> tuple[list[int], np.ndarray[Any, Any]]:
    row = [*request.token_ids, *(token for chunk in chunks for token in chunk.token_ids)]
    routes = chunks[-1].routes
    assert routes is not None, "the last chunk carries no routes though they were asked for"
    assert all(chunk.routes is None for chunk in chunks[:-1]), "routes come with the last chunk alone"
    assert routes.shape == (len(row) - 1, LAYERS, TOP_K), f"routes {routes.shape} for a row of {len(row)} tokens"
    assert routes.dtype in (np.int16, np.int32), f"routes are {routes.dtype}"
    return row, np.sort(routes)


class EngineRoutes(ServingKit):
    """Recorded experts, through batching, shared prefixes, pauses and new weights."""

    @pytest.fixture
    def experts(self, tmp_path_factory: pytest.TempPathFactory) -> Models:
        self.require("records-routes")
        return make_expert_models(tmp_path_factory.getbasetemp())

    def test_routes_are_those_of_a_full_forward(self, experts: Models) -> None:
        async def test() -> None:
            async with self.serving(experts.served, routes=True) as (engine, _):
                requests = [routed(p, name=str(i), max_tokens=4 + 3 * i, seed=i) for i, p in enumerate(PROMPTS)]
                requests += [routed(PROMPT, name=f"group-{i}", max_tokens=6, seed=i) for i in range(3)]
                for row, routes in await asyncio.gather(*(routes_of(engine, request) for request in requests)):
                    np.testing.assert_array_equal(routes, expected_routes(experts.served, row))

        self.run(test)

    def test_a_later_turn_covers_the_whole_row(self, experts: Models) -> None:
        async def test() -> None:
            async with self.serving(experts.served, routes=True) as (engine, _):
                row, _ = await routes_of(engine, routed(PROMPT, name="1", session="s", max_tokens=8, seed=1))
                second = routed([*row, 7, 8, 9], name="2", session="s", max_tokens=5, seed=2)
                again, routes = await routes_of(engine, second)
                np.testing.assert_array_equal(routes, expected_routes(experts.served, again))

        self.run(test)

    def test_a_pause_loses_no_row(self, experts: Models) -> None:
        async def test() -> None:
            async with self.serving(experts.served, routes=True) as (engine, _):
                request = routed(PROMPT, max_tokens=30, seed=3)
                stream = engine.generate(request)
                chunks = [await anext(stream)]
                await engine.pause()
                await engine.resume()
                row, routes = joined(request, [*chunks, *[chunk async for chunk in stream]])
                np.testing.assert_array_equal(routes, expected_routes(experts.served, row))

        self.run(test)

    def test_what_was_recorded_first_stays_when_new_weights_recompute_the_prefix(self, experts: Models) -> None:
        async def test() -> None:
            async with self.serving(experts.served, routes=True) as (engine, feed):
                request = routed(PROMPT, max_tokens=30, seed=3)
                stream = engine.generate(request)
                chunks = [await anext(stream)]
                await publish(engine, feed, experts.published, 0)
                chunks += [chunk async for chunk in stream]
                row, routes = joined(request, chunks)
                # Inputs of the tokens that the old weights sampled.
                old = len(PROMPT) - 1 + sum(len(chunk.token_ids) for chunk in chunks if chunk.weight_version < 0)
                assert old < len(row) - 1, "the request ended before the new weights came"
                before, after = (expected_routes(folder, row) for folder in (experts.served, experts.published))
                np.testing.assert_array_equal(routes[:old], before[:old])
                np.testing.assert_array_equal(routes[old:], after[old:])
                assert (before != after)[:old].any(), "the models route alike, so this test shows nothing"
                # Who starts from the recomputed key-values gets the rows that made them.
                _, copied = await routes_of(engine, routed([*row, 5], name="next", max_tokens=2, seed=4))
                np.testing.assert_array_equal(copied[: len(row) - 1], after)

        self.run(test)

    def test_routes_come_only_when_asked_for(self, experts: Models) -> None:
        async def test() -> None:
            async with self.serving(experts.served, routes=True) as (engine, _):
                chunks = [chunk async for chunk in engine.generate(ask(PROMPT, max_tokens=3))]
                assert all(chunk.routes is None for chunk in chunks)
            async with self.serving(experts.served) as (engine, _):
                with pytest.raises(MilesError, match="routes"):
                    await routes_of(engine, routed(PROMPT, max_tokens=3))

        self.run(test)

    def test_a_dense_model_has_no_routes_to_record(self, models: Models) -> None:
        self.require("records-routes")

        async def test() -> None:
            with pytest.raises(MilesError, match="dense"):
                async with self.serving(models.served, routes=True):
                    pass

        self.run(test)
