"""Conformance kit for executors: ranks and engines behave as they would in one process, and none outlives `close`.

    class TestMine(ExecutorConformance):
        def make(self) -> Executor: return MyExecutor(MyOptions())

Set `ranks` to the number of trainer ranks to try. Workers must be able to import `miles_core.testing.recording`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from miles_core.errors import EngineLost, MilesError, RunError
from miles_core.kinds.backend import LossSettings
from miles_core.kinds.engine import GenerateRequest
from miles_core.kinds.executor import EngineSpec, Executor, TrainerSpec
from miles_core.testing.backend_oracle import ADAMW
from miles_core.testing.recording import RecordingOptions
from miles_core.types import SamplingParams, TrainBatch

BACKEND = "miles_core.testing.recording:RecordingBackend"
ENGINE = "miles_core.testing.recording:RecordingEngine"


def trainer_spec(
    *, world_size: int = 1, load: str = BACKEND, options: RecordingOptions | None = None, model_path: str = ""
) -> TrainerSpec:
    """A trainer over the recording backend."""
    return TrainerSpec(
        load=load,
        options=options or RecordingOptions(),
        world_size=world_size,
        model_path=model_path,
        device="cpu",
        seed=0,
        optimizer=ADAMW,
        loss=LossSettings(load="miles_core.algorithms.losses:ppo_clip"),
        reference=False,
    )


def engine_spec(
    *, count: int = 1, load: str = ENGINE, options: RecordingOptions | None = None, model_path: str = ""
) -> EngineSpec:
    """Engines that record."""
    return EngineSpec(
        load=load,
        options=options or RecordingOptions(),
        count=count,
        model_path=model_path,
        context_length=None,
        device="cpu",
        seed=0,
    )


def tiny_batch(lengths: tuple[int, ...] = (3, 2)) -> TrainBatch:
    """A batch of made-up numbers: S = len(lengths), N = sum(lengths)."""
    total = sum(lengths)
    zeros = np.zeros(total, dtype=np.float32)
    return TrainBatch(
        lengths=np.asarray(lengths, dtype=np.int64),
        group_ids=np.zeros(len(lengths), dtype=np.int64),
        rewards=np.zeros(len(lengths), dtype=np.float32),
        temperatures=np.ones(len(lengths), dtype=np.float32),
        token_ids=np.arange(total, dtype=np.int32),
        loss_mask=np.ones(total, dtype=np.bool_),
        rollout_logprobs=zeros,
        versions=np.zeros(total, dtype=np.int64),
        advantages=zeros,
        token_weights=np.full(total, 1 / total, dtype=np.float32),
        correction_weights=np.ones(total, dtype=np.float32),
    )


class ExecutorConformance:
    """Subclass it and say how to make the executor. Executors that place several ranks set `ranks`."""

    ranks = 1
    deadline_s = 60.0

    def make(self) -> Executor:
        raise NotImplementedError

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Executor]:
        executor = self.make()
        try:
            async with asyncio.timeout(self.deadline_s):
                yield executor
        finally:
            await executor.close()

    async def test_ranks_work_together_on_one_batch(self) -> None:
        async with self.running() as executor:
            trainer = await executor.start_trainer(trainer_spec(world_size=self.ranks))
            metrics = await trainer.train_step(tiny_batch())
            expected = {"tokens": 5.0 * self.ranks, "ranks": self.ranks * (self.ranks + 1) / 2}
            assert dict(metrics.values) == expected, f"every rank must get the whole batch once: {metrics.values}"

    async def test_log_probs_are_those_of_rank_0(self) -> None:
        async with self.running() as executor:
            trainer = await executor.start_trainer(trainer_spec(world_size=self.ranks))
            found = await trainer.log_probs(tiny_batch(), model="reference")
            np.testing.assert_array_equal(found, np.full(5, -1.0, dtype=np.float32))

    async def test_every_rank_saves_and_loads(self, tmp_path: Path) -> None:
        async with self.running() as executor:
            trainer = await executor.start_trainer(trainer_spec(world_size=self.ranks))
            await trainer.save(tmp_path / "step")
            assert len(list((tmp_path / "step").iterdir())) == self.ranks
            await trainer.load(tmp_path / "step")

    async def test_a_failing_rank_is_named_with_its_own_message(self) -> None:
        async with self.running() as executor:
            spec = trainer_spec(world_size=self.ranks, options=RecordingOptions(fail_step="singular matrix"))
            trainer = await executor.start_trainer(spec)
            with pytest.raises(RunError) as caught:
                await trainer.train_step(tiny_batch())
            assert "singular matrix" in str(caught.value), f"the rank's message is lost: {caught.value}"
            assert f"trainer rank {self.ranks - 1}" in str(caught.value.where), "the failing rank must be in `where`"

    async def test_engines_are_started_and_stream_their_tokens(self) -> None:
        async with self.running() as executor:
            engines = await executor.start_engines(engine_spec(count=2))
            assert len(engines) == 2
            chunks = [chunk async for chunk in engines[1].generate(generate_request("a", (5, 6, 7)))]
            assert [token for chunk in chunks for token in chunk.token_ids] == [5, 6, 7]
            assert [chunk.finish_reason is not None for chunk in chunks] == [False, False, True]

    async def test_a_paused_engine_keeps_its_requests(self) -> None:
        async with self.running() as executor:
            (engine,) = await executor.start_engines(engine_spec())
            await engine.pause()
            stream = engine.generate(generate_request("a", (1, 2)))
            first = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.2)
            assert not first.done(), "a paused engine produced tokens"
            await engine.resume()
            assert (await first).token_ids == (1,)
            assert (await anext(stream)).token_ids == (2,)

    async def test_an_engine_is_replaced_and_its_requests_are_told(self) -> None:
        async with self.running() as executor:
            engines = await executor.start_engines(engine_spec(count=2))
            stream = engines[1].generate(generate_request("a", (5,) * 2000))
            await anext(stream)
            fresh = await executor.restart_engine(1)
            with pytest.raises(EngineLost):
                _ = [chunk async for chunk in stream]
            assert fresh is not engines[1]
            assert await fresh.version() == -1, "a replaced engine holds no published weights"
            assert [chunk.token_ids async for chunk in fresh.generate(generate_request("b", (7, 8)))] == [(7,), (8,)]
            assert [chunk.token_ids async for chunk in engines[0].generate(generate_request("c", (9,)))] == [(9,)]

    async def test_an_engine_that_does_not_start_is_named(self) -> None:
        async with self.running() as executor:
            with pytest.raises(MilesError) as caught:
                await executor.start_engines(engine_spec(count=2, options=RecordingOptions(fail_start=(1,))))
            assert "planned failure to start" in str(caught.value)
            assert "engine 1" in str(caught.value.where), "the failing engine must be in `where`"

    async def test_engines_added_later_are_numbered_on_and_replaced_as_they_were(self) -> None:
        async with self.running() as executor:
            await executor.start_engines(engine_spec())
            # Would fail as number 0, and number 0 would fail if it were replaced by this call's spec.
            added = await executor.start_engines(engine_spec(options=RecordingOptions(fail_start=(0,))))
            assert len(added) == 1
            for index in (0, 1):
                fresh = await executor.restart_engine(index)
                assert [chunk.token_ids async for chunk in fresh.generate(generate_request("b", (7,)))] == [(7,)]

    async def test_describe_says_where_everything_runs(self) -> None:
        async with self.running() as executor:
            await executor.start_trainer(trainer_spec(world_size=self.ranks))
            await executor.start_engines(engine_spec())
            expected = {"engine 0", *(f"trainer rank {rank}" for rank in range(self.ranks))}
            found = set(await executor.describe())
            assert found == expected, f"describe names {sorted(found)}, expected {sorted(expected)}"

    async def test_close_is_idempotent_and_ends_calls(self) -> None:
        async with self.running() as executor:
            trainer = await executor.start_trainer(trainer_spec(world_size=self.ranks))
            (engine,) = await executor.start_engines(engine_spec())
            await executor.close()
            await executor.close()
            with pytest.raises(MilesError):
                await trainer.train_step(tiny_batch())
            with pytest.raises(MilesError):
                _ = [chunk async for chunk in engine.generate(generate_request("a", (1,)))]


def generate_request(request_id: str, token_ids: tuple[int, ...]) -> GenerateRequest:
    """A request with neutral sampling."""
    return GenerateRequest(
        request_id=request_id, session_id="s", token_ids=token_ids, params=SamplingParams(max_tokens=len(token_ids))
    )
