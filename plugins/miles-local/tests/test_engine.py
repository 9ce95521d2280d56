"""What engine `local` promises beyond the kit: sharing, determinism, crashes, and clear refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_core import watch
from miles_core.errors import EngineError
from miles_core.kinds.engine import EngineContext, GenerateRequest
from miles_core.testing.engine_oracle import Feed, answers, ask, collect, greedy, publish
from miles_core.testing.tiny import make_tiny_model
from miles_core.testing.waiting import until
from miles_local.engine import LocalEngine
from miles_local.model import LocalModel, Sampled
from miles_local.options import LocalOptions
from miles_local.scheduler import Plan

PROMPT = [1, *range(40, 60)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), context=128)


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("other"), seed=1, context=128)


@asynccontextmanager
async def serving(folder: Path, **options: Any) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(
        LocalOptions(**options), EngineContext(model_path=str(folder), context_length=None, device="cpu", seed=0)
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def mixed(count: int = 7, **params: Any) -> list[GenerateRequest]:
    prompts = [PROMPT[: 1 + 3 * i] for i in range(count)]
    return [ask(p, name=str(i), max_tokens=4 + 2 * i, seed=i, **params) for i, p in enumerate(prompts)]


async def test_equal_runs_are_equal_bit_for_bit(model: Path) -> None:
    found = []
    for _ in range(2):
        async with serving(model, max_batch_size=3, prefill_tokens=10) as engine:
            found.append(await answers(engine, mixed()))
    assert found[0] == found[1]


async def test_in_float64_batched_answers_are_those_of_one_request_at_a_time(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, dtype="float64", context=128)
    async with serving(folder, max_batch_size=3, prefill_tokens=10) as engine:
        together = await answers(engine, mixed(top_p=0.9))
    async with serving(folder, prefix_cache=False) as engine:
        alone = [(await answers(engine, [request]))[0] for request in mixed(top_p=0.9)]
    for batched, single in zip(together, alone, strict=True):
        assert batched.token_ids == single.token_ids
        assert batched.logprobs == pytest.approx(single.logprobs, abs=1e-12)


async def test_a_group_computes_its_prompt_once(model: Path) -> None:
    async with serving(model) as engine:
        found = await answers(engine, [ask(PROMPT, name=str(i), max_tokens=3, seed=i) for i in range(6)])
        stats = await engine.stats()
    assert stats["tokens_prefilled"] == len(PROMPT)
    assert [answer.cached_tokens for answer in found] == [0] + [len(PROMPT) - 1] * 5


async def test_a_sessions_next_turn_reuses_all_that_was_computed(model: Path) -> None:
    async with serving(model) as engine:
        (first,) = await answers(engine, [ask(PROMPT, session="s", max_tokens=9, seed=1)])
        row = [*PROMPT, *first.token_ids]
        (second,) = await answers(engine, [ask([*row, 4, 5], session="s", max_tokens=4, temperature=0.0)])
        assert second.cached_tokens == len(row) - 1, "all but the last sampled token, which was never an input"
        assert second.token_ids == greedy(model, [*row, 4, 5], 4)


async def test_after_an_update_the_engine_equals_a_fresh_one(model: Path, other_weights: Path) -> None:
    async with serving(model) as engine:
        feed = Feed()
        await engine.open_receiver(lambda: feed)
        await answers(engine, mixed())
        await publish(engine, feed, other_weights, 0)
        updated = await answers(engine, mixed())
    async with serving(other_weights) as fresh:
        expected = await answers(fresh, mixed())
    for found, wanted in zip(updated, expected, strict=True):
        assert (found.token_ids, found.logprobs) == (wanted.token_ids, wanted.logprobs)
        assert set(found.versions) == {0}


async def test_an_abort_frees_its_slot_at_once(model: Path) -> None:
    async with serving(model, max_batch_size=1) as engine:
        long: Any = engine.generate(ask(PROMPT, name="long", max_tokens=100))
        await anext(long)
        queued = asyncio.create_task(answers(engine, [ask(PROMPT, name="queued", max_tokens=2)]))
        await long.aclose()
        await queued
        assert (await engine.stats())["tokens_sampled"] < 30


async def test_a_waiting_request_can_be_aborted(model: Path) -> None:
    async with serving(model, max_batch_size=1) as engine:
        running = asyncio.create_task(answers(engine, [ask(PROMPT, name="running", max_tokens=20)]))
        queued = asyncio.create_task(answers(engine, [ask(PROMPT, name="queued", max_tokens=20)]))
        async with asyncio.timeout(60):
            while [(await engine.stats())[name] for name in ("running", "waiting")] != [1, 1]:  # noqa: ASYNC110
                await asyncio.sleep(0)
        queued.cancel()
        await asyncio.gather(queued, return_exceptions=True)
        await running
        assert (await engine.stats())["tokens_sampled"] == 20


async def test_a_crash_fails_every_request_and_the_engine_goes_on(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, steps = LocalModel.step, 0

    def crash_on_third(self: LocalModel, plan: Plan) -> Sampled:
        nonlocal steps
        steps += 1
        if steps == 3:
            raise RuntimeError("out of memory, say")
        return real(self, plan)

    monkeypatch.setattr(LocalModel, "step", crash_on_third)
    async with serving(model, max_batch_size=2) as engine:
        tasks = [asyncio.create_task(collect(engine.generate(request))) for request in mixed(4)]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(error, EngineError) for error in found)
        assert "RuntimeError: out of memory, say" in str(found[0])
        (answer,) = await answers(engine, [ask(PROMPT, max_tokens=5, temperature=0.0)])
        assert answer.token_ids == greedy(model, PROMPT, 5)


async def test_diverged_weights_fail_requests_instead_of_sampling_nonsense(model: Path) -> None:
    async with serving(model) as engine:
        view = engine._served().views["model.norm.weight"]
        view.fill_(float("nan"))
        with pytest.raises(EngineError, match="logits are not finite"):
            await answers(engine, [ask(PROMPT)])


async def test_padding_keeps_no_nan_of_diverged_weights(model: Path, other_weights: Path) -> None:
    async with serving(model) as engine:
        feed = Feed()
        await engine.open_receiver(lambda: feed)
        for view in engine._served().views.values():
            view.fill_(float("nan"))
        with pytest.raises(EngineError):
            await answers(engine, [ask([*PROMPT, *PROMPT])])
        await publish(engine, feed, other_weights, 1)
        requests = [ask(PROMPT, name="a", max_tokens=4, temperature=0.0), ask([9], name="b", max_tokens=4)]
        assert (await answers(engine, requests))[0].token_ids == greedy(other_weights, PROMPT, 4)


async def test_who_waits_is_named_while_paused(model: Path) -> None:
    async with serving(model) as engine:
        await engine.pause()
        task = asyncio.create_task(answers(engine, [ask(PROMPT, name="r17", max_tokens=1)]))
        await until(lambda: "engine local 0 waits for resume" in watch.describe())
        assert "request r17 waits for engine local 0" in watch.describe()
        await engine.resume()
        await task


async def test_an_update_that_its_caller_gives_up_is_still_whole(model: Path, other_weights: Path) -> None:
    async with serving(model) as engine:
        feed = Feed()
        await engine.open_receiver(lambda: feed)
        await publish(engine, feed, other_weights, 0)
        await engine.receive(0)
        task = asyncio.create_task(engine.activate(0))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        (answer,) = await answers(engine, [ask(PROMPT, max_tokens=4, temperature=0.0)])
        assert answer.token_ids == greedy(other_weights, PROMPT, 4)
        with pytest.raises(EngineError, match="nothing staged"):
            await engine.activate(0)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"temperature": -1.0}, "`temperature`"),
        ({"temperature": float("nan")}, "`temperature`"),
        ({"top_p": 0.0}, "`top_p`"),
        ({"top_k": -1}, "`top_k`"),
        ({"min_p": 1.5}, "`min_p`"),
        ({"max_tokens": 0}, "`max_tokens`"),
        ({"stop": ("",)}, "`stop`"),
        ({"stop_token_ids": (275,)}, "`stop_token_ids`"),
    ],
)
async def test_parameters_without_a_meaning_are_refused(model: Path, params: dict[str, Any], words: str) -> None:
    async with serving(model) as engine:
        with pytest.raises(EngineError, match=words):
            await answers(engine, [ask(PROMPT, **params)])


async def test_requests_it_cannot_serve_are_refused(model: Path, tmp_path: Path) -> None:
    async with serving(model) as engine:
        with pytest.raises(EngineError, match="prompt is empty"):
            await answers(engine, [ask([])])
        routed = GenerateRequest(request_id="r", session_id="r", token_ids=(1,), params=ask([1]).params, routes=True)
        with pytest.raises(EngineError, match="expert routes were asked for"):
            await answers(engine, [routed])
    bare = make_tiny_model(tmp_path, layers=1)
    (bare / "tokenizer.json").unlink()
    async with serving(bare) as engine:
        with pytest.raises(EngineError, match="stop strings need"):
            await answers(engine, [ask(PROMPT, stop=("x",))])


async def test_folders_and_contexts_it_cannot_serve_are_refused(model: Path, tmp_path: Path) -> None:
    for path, length, words in (
        (tmp_path / "absent", None, "no such folder"),
        (tmp_path, None, "no config.json"),
        (model, 129, "context_length 129"),
    ):
        engine = LocalEngine(
            LocalOptions(), EngineContext(model_path=str(path), context_length=length, device="cpu", seed=0)
        )
        with pytest.raises(EngineError, match=words):
            await engine.start()
        await engine.close()
    with pytest.raises(EngineError, match="the engine was closed"):
        await answers(engine, [ask(PROMPT)])


async def test_dtype_is_the_checkpoints_unless_asked_otherwise(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, layers=1, dtype="bfloat16")
    for option, expected in (("checkpoint", torch.bfloat16), ("float32", torch.float32)):
        async with serving(folder, dtype=option) as engine:
            assert {view.dtype for view in engine._served().views.values()} == {expected}


async def test_a_pause_returns_requests_to_the_queue_unless_it_freezes_them(model: Path) -> None:
    async with serving(model) as engine:
        stream = engine.generate(ask(PROMPT, max_tokens=40, temperature=0.0))
        first = await anext(stream)
        await engine.pause("in-place")
        frozen = await engine.stats()
        await engine.pause("retract")
        retracted = await engine.stats()
        assert (frozen["running"], frozen["waiting"]) == (1, 0)
        assert (retracted["running"], retracted["waiting"]) == (0, 1)
        before = retracted["tokens_prefilled"]
        await engine.resume()
        answer = await collect(stream, [first])
        assert answer.token_ids == greedy(model, PROMPT, 40)
        assert (await engine.stats())["tokens_prefilled"] > before + len(PROMPT), "the prefix was not recomputed"
