"""Executor `ray` on one local cluster, shared by this module."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path

import pytest
import ray

from miles_core.errors import EngineError, EngineLost, PluginError, RunError, TransportError
from miles_core.kinds.engine import Chunk, Engine
from miles_core.kinds.executor import Executor
from miles_core.testing.executor import ExecutorConformance, engine_spec, generate_request, tiny_batch, trainer_spec
from miles_core.testing.recording import RecordingOptions, example_weights
from miles_core.testing.waiting import until
from miles_core.weights.digests import digest_tensor
from miles_core.weights.equality import check_weight_update_equal
from miles_core.weights.lifecycle import publish
from miles_ray.engine import RayEngine
from miles_ray.executor import RayExecutor
from miles_ray.options import RayOptions
from miles_transports.broadcast import BroadcastTransport
from miles_transports.options import BroadcastOptions

OPTIONS = RayOptions(num_cpus=2, object_store_mib=100, cpus_per_rank=0.1, cpus_per_engine=0.1, start_timeout_s=240.0)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One Ray for all tests: an executor that finds a running one joins it and leaves it running."""
    owner = RayExecutor(OPTIONS)
    owner._join_cluster()
    yield
    asyncio.run(owner.close())
    assert not ray.is_initialized()


@pytest.mark.slow
class TestRay(ExecutorConformance):
    ranks = 2

    def make(self) -> Executor:
        return RayExecutor(OPTIONS)


@contextlib.asynccontextmanager
async def executor_running() -> AsyncIterator[RayExecutor]:
    executor = RayExecutor(OPTIONS)
    try:
        yield executor
    finally:
        await executor.close()


async def pids_of(executor: RayExecutor) -> dict[str, int]:
    return {name: int(text.split()[1]) for name, text in (await executor.describe()).items()}


async def test_two_ranks_feed_two_engines_and_a_dead_engine_refuses_the_next_version() -> None:
    transport = BroadcastTransport(BroadcastOptions(timeout_s=120.0))
    async with executor_running() as executor:
        trainer = await executor.start_trainer(trainer_spec(world_size=2))
        engines = await executor.start_engines(engine_spec(count=2))
        pids = await pids_of(executor)
        assert len({*pids.values(), os.getpid()}) == 5

        metrics = await trainer.train_step(tiny_batch())
        assert dict(metrics.values) == {"tokens": 10.0, "ranks": 3.0}

        await transport.open(trainer, engines)
        await check_weight_update_equal(functools.partial(publish, transport, engines), engines, 0, seed=1)
        report = await publish(transport, engines, 1)
        expected = {name: digest_tensor(tensor) for name, tensor in example_weights(1).items()}
        assert report.manifest.digests == expected
        for engine in engines:
            assert await engine.version() == 1
            assert await engine.digests() == expected

        await requests_share_messages_and_end_early(engines[0])

        os.kill(pids["engine 1"], signal.SIGKILL)
        with pytest.raises(TransportError, match="engine 1 died"):
            await publish(transport, engines, 2)
        assert await engines[0].version() == 1
        await transport.close()
    await gone(pids.values())


async def requests_share_messages_and_end_early(engine: Engine) -> None:
    assert isinstance(engine, RayEngine)
    prompt = tuple(range(20))

    async def collect(name: int) -> list[int]:
        request = generate_request(str(name), prompt)
        return [token async for chunk in engine.generate(request) for token in chunk.token_ids]

    results = await asyncio.gather(*(collect(name) for name in range(32)))
    assert all(result == list(prompt) for result in results)
    assert engine.messages < 32 * 20 / 4, "chunks of concurrent requests must share round trips"

    stream = engine.generate(generate_request("early", tuple(range(2000))))
    assert (await anext(stream)).token_ids == (0,)
    await stream.aclose()
    for _ in range(1200):
        if (await engine.stats())["requests"] == 0:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("an abandoned stream must end in the engine")


async def test_a_rank_that_raises_and_an_engine_that_dies_are_named_in_the_drivers_own_errors() -> None:
    async with executor_running() as executor:
        options = RecordingOptions(fail_step="singular matrix")
        trainer = await executor.start_trainer(trainer_spec(world_size=2, options=options))
        (engine,) = await executor.start_engines(engine_spec())
        pids = await pids_of(executor)
        # Rank 0 waits in a collective for half an hour; the driver must not.
        with pytest.raises(RunError, match="ValueError: singular matrix") as caught:
            async with asyncio.timeout(240):
                await trainer.train_step(tiny_batch())
        assert type(caught.value) is RunError
        assert caught.value.where == "trainer rank 1"
        with pytest.raises(RunError, match="cannot save"):
            await trainer.save(Path("unused"))

        await engine.pause()
        waiting = [asyncio.create_task(_first(engine, name)) for name in ("a", "b")]
        await asyncio.sleep(0.3)
        os.kill(pids["engine 0"], signal.SIGKILL)
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [EngineLost, EngineLost]
        assert {outcome.where for outcome in outcomes if isinstance(outcome, EngineError)} == {"engine 0"}
    await gone(pids.values())


async def _first(engine: Engine, name: str) -> Chunk:
    return await anext(engine.generate(generate_request(name, (1, 2))))


@pytest.mark.slow
async def test_a_rank_that_dies_is_named_before_the_connections_it_broke() -> None:
    async with executor_running() as executor:
        trainer = await executor.start_trainer(trainer_spec(world_size=2))
        os.kill((await pids_of(executor))["trainer rank 1"], signal.SIGKILL)
        with pytest.raises(RunError, match="trainer rank 1 died") as caught:
            await trainer.train_step(tiny_batch())
        assert caught.value.where == "trainer rank 1"


@pytest.mark.slow
async def test_ranks_that_do_not_start_say_why_and_are_closed_at_once() -> None:
    executor = RayExecutor(OPTIONS)
    with pytest.raises(PluginError, match="no_such_module:Backend") as caught:
        await executor.start_trainer(trainer_spec(world_size=2, load="no_such_module:Backend"))
    assert "trainer rank" in str(caught.value.where)
    async with asyncio.timeout(60):
        await executor.close()


async def test_a_cluster_without_room_is_an_error_that_says_what_is_free() -> None:
    async with asyncio.timeout(60):  # what tests before took is given back a while after they end
        while ray.available_resources().get("CPU") != 2.0:  # noqa: ASYNC110 - a test looks from outside
            await asyncio.sleep(0.1)
    executor = RayExecutor(OPTIONS.model_copy(update={"cpus_per_rank": 50.0, "start_timeout_s": 0.5}))
    with pytest.raises(RunError, match="no room for 1 trainer ranks") as caught:
        await executor.start_trainer(trainer_spec())
    assert "'CPU': 2.0" in str(caught.value.found)
    await executor.close()


async def gone(pids: Iterable[int]) -> None:
    """Every process ends soon after `close`."""
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), f"the end of {pids} after close")
