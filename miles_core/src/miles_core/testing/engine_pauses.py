"""The part of the engine kit about pauses: what becomes of requests in flight, and over which KV they go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest

from miles_core.kinds.engine import Engine, EngineContext
from miles_core.testing.engine_oracle import (
    PROMPTS,
    Feed,
    Models,
    answers,
    ask,
    collect,
    greedy,
    greedy_over_old_kv,
    make_models,
    publish,
)
from miles_core.types import FinishReason

T = TypeVar("T")

TRIES = 5
"""Of a test that must interrupt a request."""


class ServingKit:
    """How the tests of the engine kit make an engine, connect it, and bound their time."""

    provides: ClassVar[frozenset[str]] = frozenset()
    """The tags its capability declares."""
    tolerance: ClassVar[float] = 1e-4
    """Greatest difference to the full forward's log-prob, in nats."""
    refused_filters: ClassVar[frozenset[str]] = frozenset()
    """Sampling parameters the engine refuses by name, in the mode under test."""
    deadline_s: ClassVar[float] = 60.0
    """A test that takes longer hangs."""
    flight_tokens: ClassVar[int] = 14
    """Output of requests that must still run when a pause reaches them; more, up to 60, for an engine that samples
    ahead of its reader."""

    def make(self, context: EngineContext) -> Engine:
        raise NotImplementedError

    @pytest.fixture
    def models(self, tmp_path_factory: pytest.TempPathFactory) -> Models:
        return make_models(tmp_path_factory.getbasetemp())

    @asynccontextmanager
    async def serving(self, folder: Path, **context: Any) -> AsyncIterator[tuple[Engine, Feed]]:
        """A started engine connected to a feed of weights."""
        defaults: dict[str, Any] = {"context_length": None, "device": "cpu", "seed": 0}
        engine = self.make(EngineContext(model_path=str(folder), **{**defaults, **context}))
        await engine.start()
        before, feed = Feed(), Feed()
        await engine.open_receiver(lambda: before)
        await engine.open_receiver(lambda: feed)
        assert before.closed, "a receiver is left open when the transport is connected anew"
        try:
            yield engine, feed
        finally:
            await engine.close()

    def run(self, test: Callable[[], Awaitable[T]]) -> T:
        async def limited() -> T:
            async with asyncio.timeout(self.deadline_s):
                return await test()

        return asyncio.run(limited())

    def until_in_time(self, test: Callable[[], Awaitable[bool]], otherwise: str) -> None:
        """Run a test that says whether it interrupted a request in time, until it did: an engine in another process may
        be done before a machine that stands still for a moment comes to interrupt it."""
        assert any(self.run(test) for _ in range(TRIES)), otherwise

    def require(self, tag: str) -> None:
        if tag not in self.provides:
            pytest.skip(f"the engine does not declare {tag}")


class EnginePauses(ServingKit):
    """Pausing, resuming, and weight updates between."""

    def test_a_pause_holds_requests_and_loses_none(self, models: Models) -> None:
        async def test() -> None:
            async with self.serving(models.served) as (engine, _):
                requests = [ask(p, name=str(i), max_tokens=12, temperature=0.0) for i, p in enumerate(PROMPTS)]
                streams = [engine.generate(request) for request in requests]
                first = [await anext(stream) for stream in streams]
                await engine.pause()
                await engine.pause()
                before = (await engine.stats())["tokens_sampled"]
                late = asyncio.create_task(answers(engine, [ask(PROMPTS[1], name="late", max_tokens=2)]))
                await asyncio.sleep(0.05)
                assert (await engine.stats())["tokens_sampled"] == before, "tokens were sampled during the pause"
                assert not late.done(), "a request was served during the pause"
                await engine.resume()
                for request, stream, chunk in zip(requests, streams, first, strict=True):
                    answer = await collect(stream, [chunk])
                    assert answer.finish_reason is FinishReason.LENGTH, "a request was lost in the pause"
                    assert answer.token_ids == greedy(models.served, request.token_ids, 12)
                await late

        self.run(test)

    def test_requests_in_flight_go_on_under_the_new_weights(self, models: Models) -> None:
        async def test() -> bool:
            async with self.serving(models.served) as (engine, feed):
                requests = [
                    ask(p, name=str(i), max_tokens=self.flight_tokens, temperature=0.0) for i, p in enumerate(PROMPTS)
                ]
                first: Any = engine.generate(requests[0])
                rest = asyncio.create_task(answers(engine, requests[1:]))
                chunk = await anext(first)
                await publish(engine, feed, models.published, 3)
                found = [await collect(first, [chunk]), *await rest]
            for request, answer in zip(requests, found, strict=True):
                old = answer.versions.count(-1)
                assert answer.versions == [-1] * old + [3] * (self.flight_tokens - old), f"versions {answer.versions}"
                assert answer.token_ids[:old] == greedy(models.served, request.token_ids, old)
                row = [*request.token_ids, *answer.token_ids[:old]]
                assert answer.token_ids[old:] == greedy(models.published, row, self.flight_tokens - old), (
                    "tokens after the update are not those of the new weights over the whole row"
                )
            return 0 < found[0].versions.count(-1) < self.flight_tokens

        self.until_in_time(test, "no request was in flight during the update")

    def test_frozen_requests_go_on_over_their_old_kv_and_nobody_else_does(self, models: Models) -> None:
        self.require("pauses-in-place")
        prompt = PROMPTS[2]

        async def test() -> bool:
            async with self.serving(models.served) as (engine, feed):
                frozen = engine.generate(ask(prompt, name="frozen", max_tokens=self.flight_tokens, temperature=0.0))
                first = await anext(frozen)
                await publish(engine, feed, models.published, 0, "in-place")
                beside = asyncio.create_task(
                    answers(engine, [ask(prompt, name="beside", max_tokens=6, temperature=0.0)])
                )
                answer = await collect(frozen, [first])
                (other,) = await beside
                (after,) = await answers(engine, [ask(prompt, name="after", max_tokens=6, temperature=0.0)])
            for late in (other, after):
                assert late.token_ids == greedy(models.published, prompt, 6), "a request reused KV of the old weights"
            old = answer.versions.count(-1)
            assert answer.versions == [-1] * old + [0] * (self.flight_tokens - old), f"versions {answer.versions}"
            assert answer.token_ids[:old] == greedy(models.served, prompt, old), "tokens were sampled again"
            if not 0 < old < self.flight_tokens:
                return False
            row = [*prompt, *answer.token_ids[:old]]
            expected = greedy_over_old_kv(models.served, models.published, row, self.flight_tokens - old)
            fresh = greedy(models.published, row, self.flight_tokens - old)
            assert expected != fresh, "the two models are too alike for this test"
            assert answer.token_ids[old:] != fresh, "the KV of a frozen request was recomputed"
            assert answer.token_ids[old:] == expected, "a frozen request does not go on over its KV"
            return True

        self.until_in_time(test, "the request was not in flight during the update")

    def test_an_abort_ends_requests_in_flight_and_keeps_their_tokens(self, models: Models) -> None:
        async def test() -> bool:
            async with self.serving(models.served) as (engine, _):
                requests = [ask(p, name=str(i), max_tokens=60, temperature=0.0) for i, p in enumerate(PROMPTS)]
                stream = engine.generate(requests[0])
                rest = asyncio.create_task(answers(engine, requests[1:]))
                first = await anext(stream)
                await engine.pause("abort")
                found = [await collect(stream, [first]), *await rest]
                late = asyncio.create_task(answers(engine, [ask(PROMPTS[1], name="late", max_tokens=2)]))
                await asyncio.sleep(0.05)
                assert not late.done(), "a request was served during the pause"
                await engine.resume()
                (after,) = await late
                assert after.finish_reason is FinishReason.LENGTH, "the abort outlived the pause"
            assert found[0].token_ids, "the abort took the tokens along"
            for request, answer in zip(requests, found, strict=True):
                assert answer.token_ids == greedy(models.served, request.token_ids, len(answer.token_ids))
            if any(len(answer.token_ids) == 60 for answer in found):
                return False
            for answer in found:
                assert answer.finish_reason is FinishReason.ABORT, "an aborted request ended otherwise"
            return True

        self.until_in_time(test, "the abort came too late")
