"""Engines that are lost under a request: it goes on elsewhere from its ids, and nothing is sampled twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest

from miles_core.errors import EngineError, EngineLost, SessionError
from miles_core.kinds.engine import Chunk, GenerateRequest
from miles_core.session.generation import Output, generate
from miles_core.session.pool import EnginePool
from miles_core.testing.scripted import ScriptedEngine
from miles_core.testing.virtual_time import in_virtual_time
from miles_core.types import FinishReason, NamedTensor, SamplingParams, WeightBucket

ANSWER = list(range(40, 52))
STOP = 60


def continuing(request: GenerateRequest) -> list[int]:
    """What a policy says that always says the same: the part of the answer that is not there yet."""
    return [*ANSWER, STOP][request.continued :]


def request(name: str = "r", **params: object) -> GenerateRequest:
    settings = {"max_tokens": 50, "stop_token_ids": (STOP,), **params}
    return GenerateRequest(
        request_id=name,
        session_id=name,
        token_ids=(1, 2, 3),
        params=SamplingParams(**settings),  # type: ignore[arg-type]
    )


class Version:
    """Receiver of a version that has one tensor."""

    def receive(self, version: int) -> Iterator[WeightBucket]:
        import torch

        tensors = (NamedTensor(name="w", tensor=torch.zeros(1)),)
        yield WeightBucket(version=version, index=0, last=True, tensors=tensors)

    def close(self) -> None: ...


async def at_version(version: int, **settings: int) -> ScriptedEngine:
    engine = ScriptedEngine(continuing, **settings)  # type: ignore[arg-type]
    await engine.open_receiver(Version)
    await engine.receive(version)
    await engine.activate(version)
    return engine


async def ask(pool: EnginePool, asked: GenerateRequest) -> Output:
    engine, name = pool.open(asked.session_id)
    try:
        return await generate(engine, asked, engine_name=name)
    finally:
        pool.close(asked.session_id)


@in_virtual_time
@pytest.mark.parametrize("after", range(1, 13))
async def test_a_request_whose_engine_dies_goes_on_from_its_ids_with_the_right_spans(after: int) -> None:
    first, second = await at_version(3), await at_version(4)
    pool = EnginePool([first, second])
    engine, _ = pool.open("r")
    chunks = [chunk async for chunk in _kill_after(engine.generate(request()), first, after)]
    ids = [token for chunk in chunks for token in chunk.token_ids]
    assert ids == [*ANSWER, STOP]
    versions = [chunk.weight_version for chunk in chunks for _ in chunk.token_ids]
    assert versions == [3] * after + [4] * (13 - after)
    assert chunks[-1].finish_reason is FinishReason.STOP
    (resumed,) = second.requests
    assert list(resumed.token_ids) == [1, 2, 3, *ANSWER[:after]]
    assert (resumed.continued, resumed.params.max_tokens) == (after, 50 - after)
    assert pool.requeued == 1
    assert pool.lost() == {0: "the engine was closed"}


async def _kill_after(stream: AsyncIterator[Chunk], engine: ScriptedEngine, tokens: int) -> AsyncIterator[Chunk]:
    async for chunk in stream:
        yield chunk
        tokens -= len(chunk.token_ids)
        if tokens == 0:
            await engine.close()


class LosesItsLastWord(ScriptedEngine):
    """Dies between the last token and the finish reason."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        async for chunk in super().generate(request):
            last = chunk.finish_reason is not None
            yield Chunk(token_ids=chunk.token_ids, logprobs=chunk.logprobs, weight_version=chunk.weight_version)
            if last:
                raise EngineLost("gone")


@in_virtual_time
@pytest.mark.parametrize(("limit", "reason"), [(50, FinishReason.STOP), (5, FinishReason.LENGTH)])
async def test_a_request_that_had_all_its_tokens_only_gets_its_end(limit: int, reason: FinishReason) -> None:
    spare = await at_version(0)
    output = await ask(EnginePool([LosesItsLastWord(continuing), spare]), request(max_tokens=limit))
    assert output.finish_reason is reason
    assert list(output.ids) == [*ANSWER, STOP][:limit]
    assert spare.requests == []


@in_virtual_time
async def test_an_engine_that_hangs_is_left_when_it_is_declared_lost() -> None:
    hung, spare = await at_version(0), await at_version(0)
    await hung.pause()
    pool = EnginePool([hung, spare])
    asking = asyncio.create_task(ask(pool, request()))
    await asyncio.sleep(0.01)
    assert not asking.done()
    pool.lose(0, "the engine did not answer within 1 s")
    output = await asyncio.wait_for(asking, 5)
    assert list(output.ids) == [*ANSWER, STOP]
    assert hung.running == set(), "the request is still open at the engine that hangs"


@in_virtual_time
async def test_a_cancellation_from_outside_is_one_even_when_the_engine_is_lost_at_the_same_time() -> None:
    hung = await at_version(0)
    await hung.pause()
    pool = EnginePool([hung, await at_version(0)])
    asking = asyncio.create_task(ask(pool, request()))
    await asyncio.sleep(0.01)
    asking.cancel()
    pool.lose(0, "gone")
    with pytest.raises(asyncio.CancelledError):
        await asking


@in_virtual_time
async def test_a_deadline_still_ends_a_request_that_moved() -> None:
    engines = [await at_version(0) for _ in range(2)]
    for engine in engines:
        await engine.pause()
    pool = EnginePool(engines)

    async def limited() -> Output:
        async with asyncio.timeout(0.05):
            return await ask(pool, request())

    asking = asyncio.create_task(limited())
    await asyncio.sleep(0.01)
    pool.lose(0, "gone")
    with pytest.raises(TimeoutError):
        await asking


@in_virtual_time
async def test_requests_wait_while_every_engine_is_lost_and_go_on_at_the_one_that_comes_back() -> None:
    pool = EnginePool([await at_version(0)])
    pool.lose(0, "gone")
    asking = asyncio.create_task(ask(pool, request()))
    await asyncio.sleep(0.01)
    assert not asking.done()
    pool.restore(0, await at_version(1))
    output = await asyncio.wait_for(asking, 5)
    assert output.stretches[0][1] == 1


@in_virtual_time
async def test_new_sessions_avoid_lost_engines_and_old_ones_move_for_good() -> None:
    engines = [await at_version(0) for _ in range(3)]
    pool = EnginePool(engines)
    for name in "abc":
        pool.open(name)
    pool.lose(1, "gone")
    assert await pool.route("b") in (0, 2)
    pool.open("d")
    assert pool.load()[1] == 0
    pool.restore(1, engines[1])
    assert await pool.route("b") != 1, "a session moves only when its engine is lost"
    pool.open("e")
    assert pool.load() == (2, 1, 2)
    with pytest.raises(SessionError, match="name is open"):
        pool.open("e")


@in_virtual_time
async def test_other_failures_of_an_engine_are_not_moved() -> None:
    pool = EnginePool([ScriptedEngine([EngineError("the logits are not finite")]), await at_version(0)])
    with pytest.raises(EngineError, match="not finite"):
        await ask(pool, request())
    assert pool.lost() == {}


@in_virtual_time
async def test_logprobs_of_tokens_sampled_before_the_loss_are_kept() -> None:
    first = ScriptedEngine(continuing, logprob=lambda token, position: -0.25)
    second = ScriptedEngine(continuing, logprob=lambda token, position: -0.75)
    engine, _ = EnginePool([first, second]).open("r")
    chunks = [chunk async for chunk in _kill_after(engine.generate(request()), first, 5)]
    np.testing.assert_allclose([p for chunk in chunks for p in chunk.logprobs], [-0.25] * 5 + [-0.75] * 8)
