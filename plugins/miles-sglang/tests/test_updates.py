"""Every way weights enter a real server, what a failed one leaves behind, and what a stale prefix would do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from miles_core.errors import EngineError
from miles_core.kinds.engine import EngineContext
from miles_core.testing.engine_oracle import (
    PROMPTS,
    Feed,
    Models,
    answers,
    ask,
    buckets_of,
    greedy,
    logprobs_of,
    make_models,
    publish,
    weights_of,
)
from miles_core.types import NamedTensor
from miles_core.weights.digests import digest_tensor
from miles_sglang.client import Client
from miles_sglang.engine import SglangEngine
from miles_sglang.options import SglangOptions
from miles_sglang.updates import DiskUpdate

pytestmark = pytest.mark.sglang
DEADLINE_S = 240


@pytest.fixture
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.getbasetemp())


def run(test: Coroutine[Any, Any, None]) -> None:
    """With an end: a test that takes longer hangs."""

    async def limited() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await test

    asyncio.run(limited())


@asynccontextmanager
async def attached(live: Any, models: Models, **options: Any) -> AsyncIterator[tuple[SglangEngine, Feed]]:
    chosen = SglangOptions(urls=(live.url,), dtype="float32", deterministic=True, **options)
    engine = SglangEngine(
        chosen, EngineContext(model_path=str(models.served), context_length=None, device="cpu", seed=0)
    )
    feed = Feed()
    await engine.start()
    await engine.open_receiver(lambda: feed)
    try:
        yield engine, feed
    finally:
        await engine.close()


@pytest.mark.parametrize("update", ["disk", "tensor", "distributed"])
def test_a_published_version_is_served_whole(seeded: Any, models: Models, update: str) -> None:
    async def test() -> None:
        async with attached(seeded, models, update=update) as (engine, feed):
            asked = ask(PROMPTS[2], max_tokens=6, temperature=0.0)
            for version, folder in ((0, models.published), (1, models.served)):
                await publish(engine, feed, folder, version)
                (answer,) = await answers(engine, [asked])
                assert answer.token_ids == greedy(folder, PROMPTS[2], 6)
                assert answer.versions == [version] * 6
                expected = {name: digest_tensor(tensor) for name, tensor in weights_of(folder).items()}
                assert dict(await engine.digests()) == expected

    run(test())


@pytest.mark.parametrize("update", ["disk", "tensor"])
def test_an_update_that_fails_half_way_leaves_the_version_before(seeded: Any, models: Models, update: str) -> None:
    async def test() -> None:
        async with attached(seeded, models, update=update) as (engine, feed):
            await publish(engine, feed, models.published, 0)
            tensors = [NamedTensor(name=name, tensor=t) for name, t in weights_of(models.served).items()]
            feed.buckets = buckets_of(1, tensors)
            await engine.pause()
            await engine.receive(1)
            spoil(engine, update)
            with pytest.raises(EngineError, match="did not enter the server"):
                await engine.activate(1)
            assert await engine.version() == 0
            await engine.resume()
            (answer,) = await answers(engine, [ask(PROMPTS[2], max_tokens=6, temperature=0.0)])
            assert answer.token_ids == greedy(models.published, PROMPTS[2], 6)
            assert answer.versions == [0] * 6
            await publish(engine, feed, models.served, 2)
            assert await engine.version() == 2

    run(test())


def spoil(engine: SglangEngine, update: str) -> None:
    """Take from a staged version what the update needs: the whole folder, which a server answers with a refusal (half a
    file would end it), or half of the last file, which this process reads after it has sent the others."""
    staged = engine._store.staged  # the fault is in what only the engine can see
    assert staged is not None
    if update == "disk":
        staged[1].rename(staged[1].with_name("elsewhere"))
        return
    file: Path = sorted(staged[1].glob("*.safetensors"))[-1]
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])


def test_a_prefix_of_old_weights_would_have_changed_log_probs(seeded: Any, models: Models) -> None:
    """Load other weights behind the engine's back, without the flush and the key it uses: the same request then gives
    log-probs of neither model. With them it gives those of the new one."""
    prompt = [*range(40, 70)]

    async def ask_plainly(client: Client, key: str) -> list[float]:
        body = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True},
            "return_logprob": True,
            "extra_key": key,
        }
        answer = await client.post("/generate", body)
        ids = [entry[1] for entry in answer["meta_info"]["output_token_logprobs"]]
        expected = logprobs_of(models.published, prompt, ids).tolist()
        found = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        return [abs(a - b) for a, b in zip(expected, found, strict=True)]

    async def test() -> None:
        async with attached(seeded, models) as (_, _):
            client = Client(seeded.url, "test")
            await ask_plainly(client, "shared")
            body = {"model_path": str(models.published), "weight_version": "9", "flush_cache": False}
            await client.post("/update_weights_from_disk", body)
            stale = max(await ask_plainly(client, "shared"))
            fresh = max(await ask_plainly(client, "after the update"))
            await client.close()
        assert fresh < 1e-5
        assert stale > 1e-3, "a stale prefix changes nothing: this test shows nothing"

    run(test())


def test_a_server_that_sees_other_weights_at_the_checkpoints_path_is_refused(
    seeded: Any, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of another host may: the same names and shapes, other values."""

    class Elsewhere(DiskUpdate):
        async def push(self, client: Client, dialect: Any, folder: Path, name: str, *, flush: bool) -> None:
            await super().push(client, dialect, models.published, name, flush=flush)

    async def test() -> None:
        monkeypatch.setattr("miles_sglang.engine.DiskUpdate", Elsewhere)
        with pytest.raises(EngineError, match=r"serves other weights than it should(?s:.*)embed_tokens"):
            async with attached(seeded, models):
                pass

    run(test())


def test_a_load_that_a_killed_run_left_half_way_is_ended(seeded: Any, models: Models) -> None:
    async def test() -> None:
        client = Client(seeded.url, "test")
        await client.post("/begin_weight_update", {})
        await client.post("/pause_generation", {"mode": "retract"})
        async with attached(seeded, models, update="tensor") as (engine, feed):
            await publish(engine, feed, models.published, 0)
            (answer,) = await answers(engine, [ask(PROMPTS[2], max_tokens=6, temperature=0.0)])
            assert answer.token_ids == greedy(models.published, PROMPTS[2], 6)
        await client.close()

    run(test())


def test_a_server_with_other_settings_is_named_setting_by_setting(seeded: Any, models: Models) -> None:
    async def test() -> None:
        wrong = SglangOptions(urls=(seeded.url,), dtype="bfloat16", deterministic=False)
        context = EngineContext(model_path=str(models.served), context_length=None, device="cpu", seed=0, routes=True)
        with pytest.raises(EngineError, match="3 settings") as error:
            await SglangEngine(wrong, context).start()
        for flag in ("--enable-return-routed-experts", "--enable-deterministic-inference", "--dtype=bfloat16"):
            assert flag in str(error.value)

    run(test())
