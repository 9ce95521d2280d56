"""Executor `inprocess`: one rank in its own thread, engines beside it."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_core.errors import ConfigError, EngineError, MilesError, PluginError, RunError, TransportError
from miles_core.executors.inprocess import InProcessExecutor
from miles_core.executors.rank import located
from miles_core.kinds.backend import BackendContext, StepMetrics
from miles_core.kinds.executor import Executor
from miles_core.testing.executor import ExecutorConformance, engine_spec, tiny_batch, trainer_spec
from miles_core.testing.recording import RecordingBackend, RecordingOptions
from miles_core.types import TrainBatch, WeightBucket
from miles_core.watch import waiters

HERE = __name__


class TestInProcess(ExecutorConformance):
    def make(self) -> Executor:
        return InProcessExecutor(None)


class ThreadBackend(RecordingBackend):
    """Notes which thread called it; a train step ends when the event loop says so."""

    threads: set[str]
    end = threading.Event()

    def __init__(self, options: RecordingOptions, context: BackendContext) -> None:
        super().__init__(options, context)
        self.threads = {threading.current_thread().name}

    def train_step(self, batch: TrainBatch) -> StepMetrics:
        self.threads.add(threading.current_thread().name)
        assert self.end.wait(60), "the event loop stands still during a train step"
        return StepMetrics(values={"threads": float(len(self.threads)), "main": float("MainThread" in self.threads)})


@pytest.fixture
def sees_this_module(monkeypatch: pytest.MonkeyPatch) -> str:
    """Make this file importable by the name that `load` strings use."""
    import sys

    monkeypatch.setitem(sys.modules, "inprocess_doubles", sys.modules[HERE])
    return "inprocess_doubles"


async def test_every_call_runs_in_one_thread_while_the_loop_stays_live(sees_this_module: str) -> None:
    executor = InProcessExecutor(None)
    trainer = await executor.start_trainer(trainer_spec(load=f"{sees_this_module}:ThreadBackend"))
    for _ in range(2):
        ThreadBackend.end.clear()
        asyncio.get_running_loop().call_later(0.02, ThreadBackend.end.set)
        metrics = await trainer.train_step(tiny_batch())
        await trainer.log_probs(tiny_batch())
    assert metrics.values == {"threads": 1.0, "main": 0.0}
    await executor.close()


async def test_the_wait_for_a_step_is_registered_by_name(sees_this_module: str) -> None:
    executor = InProcessExecutor(None)
    trainer = await executor.start_trainer(trainer_spec(load=f"{sees_this_module}:ThreadBackend"))
    ThreadBackend.end.clear()
    step = asyncio.create_task(trainer.train_step(tiny_batch()))
    await asyncio.sleep(0)
    ThreadBackend.end.set()
    assert [(waiter.who, waiter.on) for waiter in waiters()] == [("driver", "trainer rank 0: train_step")]
    await step
    await executor.close()


async def test_more_than_one_rank_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match="executor: ray"):
        await InProcessExecutor(None).start_trainer(trainer_spec(world_size=2))


async def test_a_foreign_error_becomes_a_run_error_with_rank_and_line() -> None:
    executor = InProcessExecutor(None)
    trainer = await executor.start_trainer(trainer_spec(options=RecordingOptions(fail_step="singular matrix")))
    with pytest.raises(RunError) as caught:
        await trainer.train_step(tiny_batch())
    assert "ValueError: singular matrix" in caught.value.message
    assert caught.value.where == "trainer rank 0"
    assert "recording.py" in str(caught.value.found)
    await executor.close()


async def test_an_unknown_backend_names_the_load_string() -> None:
    with pytest.raises(PluginError, match="no_such_module:Backend"):
        await InProcessExecutor(None).start_trainer(trainer_spec(load="no_such_module:Backend"))


async def test_an_engine_that_does_not_start_is_named_and_its_siblings_are_closed() -> None:
    executor = InProcessExecutor(None)
    with pytest.raises(EngineError, match="planned failure to start") as caught:
        await executor.start_engines(engine_spec(count=2, options=RecordingOptions(fail_start=(1,))))
    assert caught.value.where == "engine 1"
    await executor.close()


async def test_calls_after_close_say_so_and_close_is_idempotent(tmp_path: Path) -> None:
    executor = InProcessExecutor(None)
    trainer = await executor.start_trainer(trainer_spec())
    await executor.close()
    await executor.close()
    await trainer.close()
    with pytest.raises(RunError, match="not running"):
        await trainer.save(tmp_path)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("trainer-0") and thread.is_alive()]


class ListSender:
    """Keeps what it is sent; fails at one bucket."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.sent: list[WeightBucket] = []
        self.aborted: list[str] = []
        self.fail_at = fail_at

    def send(self, bucket: WeightBucket) -> None:
        if bucket.index == self.fail_at:
            raise TransportError("the wire broke")
        self.sent.append(bucket)

    def abort(self, reason: str) -> None:
        self.aborted.append(reason)

    def close(self) -> None: ...


async def test_send_weights_accounts_for_every_tensor_it_sent() -> None:
    executor = InProcessExecutor(None)
    trainer = await executor.start_trainer(trainer_spec())
    sender = ListSender()
    await trainer.open_sender(lambda: sender)
    manifest = await trainer.send_weights(3)
    names = [named.name for bucket in sender.sent for named in bucket.tensors]
    assert list(manifest.digests) == names
    assert manifest.version == 3
    assert sender.aborted == []
    await executor.close()


async def test_a_failing_export_or_sender_aborts_the_version() -> None:
    for options, sender in ((RecordingOptions(fail_export_at=1), ListSender()), (RecordingOptions(), ListSender(1))):
        executor = InProcessExecutor(None)
        trainer = await executor.start_trainer(trainer_spec(options=options))
        await trainer.open_sender(lambda sender=sender: sender)
        with pytest.raises(MilesError):
            await trainer.send_weights(0)
        assert sender.aborted
        await executor.close()


async def test_sending_before_the_transport_is_open_is_an_error() -> None:
    executor = InProcessExecutor(None)
    trainer = await executor.start_trainer(trainer_spec())
    with pytest.raises(TransportError, match="no sender"):
        await trainer.send_weights(0)
    await executor.close()


class BadExport(RecordingBackend):
    """Exports what its options' step message says is wrong."""

    def export(self, version: int) -> Any:
        buckets = list(super().export(version))
        match self._options.fail_step:
            case "unfinished":
                buckets = buckets[:-1]
            case "twice":
                buckets.insert(1, buckets[0])
            case "other version":
                buckets = list(super().export(version + 1))
            case "repeated tensor":
                buckets[1] = WeightBucket(version=version, index=1, last=False, tensors=buckets[0].tensors)
        return iter(buckets)


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("unfinished", "none marked last"),
        ("twice", "comes where"),
        ("other version", "is of version 1"),
        ("repeated tensor", "exported twice"),
    ],
)
async def test_a_malformed_export_is_refused(sees_this_module: str, fault: str, found: str) -> None:
    executor = InProcessExecutor(None)
    spec = trainer_spec(load=f"{sees_this_module}:BadExport", options=RecordingOptions(fail_step=fault))
    trainer = await executor.start_trainer(spec)
    sender = ListSender()
    await trainer.open_sender(lambda: sender)
    with pytest.raises(TransportError) as caught:
        await trainer.send_weights(0)
    assert found in str(caught.value.found)
    assert sender.aborted
    await executor.close()


async def test_describe_names_thread_process_and_host() -> None:
    executor = InProcessExecutor(None)
    await executor.start_trainer(trainer_spec())
    await executor.start_engines(engine_spec(count=2))
    described = await executor.describe()
    assert sorted(described) == ["engine 0", "engine 1", "trainer rank 0"]
    assert "thread trainer-0 of process" in described["trainer rank 0"]
    await executor.close()


def test_located_extends_an_existing_place() -> None:
    with pytest.raises(EngineError) as caught, located("engine 3", "generate"):
        raise EngineError("full", where="slot 7")
    assert caught.value.where == "engine 3; slot 7"


async def test_log_probs_come_back_as_the_rank_gave_them() -> None:
    executor = InProcessExecutor(None)
    trainer = await executor.start_trainer(trainer_spec())
    batch = tiny_batch()
    np.testing.assert_array_equal(
        await trainer.log_probs(batch, model="reference"), np.full(batch.num_tokens, -1.0, np.float32)
    )
    await executor.close()


async def test_absent_cuda_is_said_in_plain_words(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    executor = InProcessExecutor(None)
    spec = replace(trainer_spec(load="miles_core.testing.recording:RecordingBackend"), device="cuda")
    with pytest.raises(ConfigError, match=r"CUDA is not available(.|\n)*placement.device: cpu"):
        await executor.start_trainer(spec)
    await executor.close()
