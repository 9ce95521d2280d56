"""The scripted engine says its lines and lives through pauses, aborts, errors and versions as a real engine does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

from miles_core.errors import EngineError
from miles_core.kinds.engine import Chunk, GenerateRequest
from miles_core.testing.scripted import ScriptedEngine, scripted_logprob
from miles_core.testing.virtual_time import in_virtual_time
from miles_core.types import FinishReason, NamedTensor, SamplingParams, WeightBucket


def request(name: str = "r", prompt: tuple[int, ...] = (1, 2, 3), **params: object) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        session_id=name,
        token_ids=prompt,
        params=SamplingParams(**params),  # type: ignore[arg-type]
    )


async def answer(engine: ScriptedEngine, asked: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(asked)]


class Buckets:
    def __init__(self, *, last: bool = True) -> None:
        self._last = last

    def receive(self, version: int) -> Iterator[WeightBucket]:
        named = NamedTensor(name="w", tensor=torch.ones(2))
        yield WeightBucket(version=version, index=0, last=self._last, tensors=(named,))

    def close(self) -> None: ...


async def test_replies_come_in_order_of_arrival_with_positional_logprobs() -> None:
    engine = ScriptedEngine([[7, 8], [9]], tokens_per_chunk=2)
    first, second = await answer(engine, request("a")), await answer(engine, request("b"))
    assert [chunk.token_ids for chunk in first + second] == [(7, 8), (9,)]
    assert first[0].logprobs == (scripted_logprob(7, 3), scripted_logprob(8, 4))
    assert first[-1].finish_reason is FinishReason.STOP
    with pytest.raises(EngineError, match="no reply left"):
        await answer(engine, request("c"))


@pytest.mark.parametrize(
    ("reply", "params", "ids", "reason"),
    [
        ([5, 6, 7], {"max_tokens": 2}, [5, 6], FinishReason.LENGTH),
        ([5, 6, 7], {"stop_token_ids": (6,)}, [5, 6], FinishReason.STOP),
        ([5, 6], {"max_tokens": 2, "stop_token_ids": (6,)}, [5, 6], FinishReason.STOP),
        ([5, 6], {"max_tokens": 2}, [5, 6], FinishReason.LENGTH),
        ([], {}, [], FinishReason.STOP),
    ],
)
async def test_stop_tokens_stay_and_length_cuts(
    reply: list[int], params: dict[str, object], ids: list[int], reason: FinishReason
) -> None:
    chunks = await answer(ScriptedEngine([reply]), request(**params))
    assert [token for chunk in chunks for token in chunk.token_ids] == ids
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [reason]


async def test_pause_holds_requests_between_tokens_and_version_changes_mid_request() -> None:
    engine = ScriptedEngine(lambda _: [4, 5, 6])
    await engine.open_receiver(Buckets)
    chunks = engine.generate(request())
    seen = [await anext(chunks)]
    await engine.pause()
    waiting = asyncio.create_task(anext(chunks))
    await engine.receive(0)
    await engine.activate(0)
    assert not waiting.done()
    await engine.resume()
    seen += [await waiting, await anext(chunks)]
    assert [chunk.weight_version for chunk in seen] == [-1, 0, 0]
    assert set(await engine.digests()) == {"w"}


async def test_closing_the_iterator_is_an_abort_and_errors_are_raised() -> None:
    engine = ScriptedEngine([[1, 2, 3], EngineError("planned")])
    chunks = engine.generate(request("a"))
    await anext(chunks)
    await chunks.aclose()  # type: ignore[attr-defined]
    assert (engine.aborted, engine.running) == (["a"], set())
    with pytest.raises(EngineError, match="planned"):
        await answer(engine, request("b"))
    assert engine.aborted == ["a"]


async def test_incomplete_version_is_refused_and_only_a_staged_one_activates() -> None:
    engine = ScriptedEngine([])
    await engine.open_receiver(lambda: Buckets(last=False))
    with pytest.raises(EngineError, match="without a last bucket"):
        await engine.receive(1)
    with pytest.raises(EngineError, match="cannot be activated"):
        await engine.activate(1)
    assert await engine.version() == -1


async def test_close_ends_requests_with_an_error() -> None:
    engine = ScriptedEngine(lambda _: [4, 5, 6], context_length=4)
    chunks = engine.generate(request())
    with pytest.raises(EngineError, match=r"found: +4 tokens"):
        await answer(engine, request(prompt=(1, 2, 3, 4)))
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await anext(chunks)


@in_virtual_time
async def test_a_pause_that_aborts_ends_requests_with_what_they_have() -> None:
    engine = ScriptedEngine(lambda _: [4, 5, 6])
    chunks = engine.generate(request())
    await anext(chunks)
    held = asyncio.create_task(anext(chunks))
    await engine.pause()
    await asyncio.sleep(0.01)
    assert not held.done()
    await engine.pause("abort")
    last = await held
    assert (last.token_ids, last.finish_reason) == ((), FinishReason.ABORT)
    assert [chunk async for chunk in chunks] == []
    assert engine.running == set()
    assert engine.aborted == []
    await engine.resume()
    assert len(await answer(engine, request("next"))) == 3
