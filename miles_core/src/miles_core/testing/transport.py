"""Conformance kit for transports: a version arrives complete on every engine, or on none.

    class TestRing(TransportConformance):
        def make(self) -> Transport: return RingTransport(RingOptions())

The kit connects the transport's real ends to a trainer that exports known tensors and to engines that record them. They
are threads of one process, which is enough: a transport that works between processes works between threads too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import pytest

from miles_core.errors import EngineError, TransportError
from miles_core.executors.inprocess import InProcessExecutor, InProcessTrainer
from miles_core.kinds.engine import EngineContext
from miles_core.kinds.transport import Staged, Transport
from miles_core.testing.executor import tiny_batch, trainer_spec
from miles_core.testing.recording import RecordingEngine, RecordingOptions, example_weights
from miles_core.types import WeightBucket, WeightManifest
from miles_core.weights.digests import digest_tensor
from miles_core.weights.fleet import Fleet
from miles_core.weights.lifecycle import UpdateSettings

BUCKETS = 5
"""Buckets of one version in this kit: nine tensors, two in each."""


class StreamEngine(RecordingEngine):
    """Also notes the stream itself: ``(index, last)`` of every bucket, in order of arrival."""

    def __init__(self, options: RecordingOptions, context: EngineContext) -> None:
        super().__init__(options, context)
        self.stream: list[tuple[int, bool]] = []

    def taken(self, bucket: WeightBucket) -> None:
        self.stream.append((bucket.index, bucket.last))


class DeadEngine(StreamEngine):
    """Fails before it takes anything from its receiver, as an engine whose process is gone does."""

    async def receive(self, version: int) -> WeightManifest:
        raise EngineError("the engine's process is gone")


@dataclass
class Connected:
    """A transport between one trainer and some engines, open."""

    transport: Transport
    trainer: InProcessTrainer
    engines: list[StreamEngine]


class TransportConformance:
    """Subclass it and say how to make the transport."""

    deadline_s = 120.0
    """A publish that neither ends nor raises within it hangs."""
    model_path = ""
    """Checkpoint that trainer and engines started from, where the transport needs one; `write_example_checkpoint`
    makes it."""

    def make(self) -> Transport:
        raise NotImplementedError

    @contextlib.asynccontextmanager
    async def connected(
        self, engines: int = 2, options: RecordingOptions | None = None, dead: tuple[int, ...] = ()
    ) -> AsyncIterator[Connected]:
        options = options or RecordingOptions()
        executor = InProcessExecutor(None)
        trainer = await executor.start_trainer(trainer_spec(options=options, model_path=self.model_path))
        started: list[StreamEngine] = []
        for index in range(engines):
            kind = DeadEngine if index in dead else StreamEngine
            started.append(kind(options, _context(index)))
            await started[-1].start()
        transport = self.make()
        async with asyncio.timeout(self.deadline_s):
            await transport.open(trainer, started)
        try:
            yield Connected(transport, trainer, started)
        finally:
            await transport.close()
            for engine in started:
                await engine.close()
            await executor.close()

    async def publish(self, connected: Connected, version: int) -> Staged:
        async with asyncio.timeout(self.deadline_s):
            return await connected.transport.publish(version)

    async def refused(self, connected: Connected, version: int) -> TransportError:
        """The error of a publish that must fail."""
        with _must_raise(
            TransportError, "publish returned though the version is not complete on every engine"
        ) as caught:
            await self.publish(connected, version)
        assert isinstance(caught[0], TransportError)
        return caught[0]

    async def test_every_tensor_arrives_on_every_engine_bit_for_bit(self) -> None:
        async with self.connected() as connected:
            staged = await self.publish(connected, 3)
            assert len(staged.received) == 2, "publish must return one manifest per engine"
            for engine, received in zip(connected.engines, staged.received, strict=True):
                assert received == staged.sent, f"engine {engine.index} staged other tensors than were sent"
                await engine.activate(3)
                _assert_equal(engine, 3)

    async def test_buckets_arrive_in_order_and_only_the_final_one_is_last(self) -> None:
        async with self.connected() as connected:
            await self.publish(connected, 0)
            expected = [(index, index == BUCKETS - 1) for index in range(BUCKETS)]
            for engine in connected.engines:
                assert engine.stream == expected, f"engine {engine.index} got (index, last) = {engine.stream}"

    async def test_publish_stages_and_does_not_activate_pause_or_resume(self) -> None:
        async with self.connected() as connected:
            await self.publish(connected, 0)
            for engine in connected.engines:
                assert engine.events == ["receive 0"], (
                    f"the transport called {engine.events}; activation is not its business"
                )

    async def test_a_second_version_follows_on_the_same_connection(self) -> None:
        async with self.connected() as connected:
            for version in (0, 1):
                staged = await self.publish(connected, version)
                assert staged.sent.version == version
                for engine in connected.engines:
                    await engine.activate(version)
                    _assert_equal(engine, version)

    async def test_received_tensors_do_not_follow_the_trainers_next_step(self) -> None:
        async with self.connected(options=RecordingOptions(live=True)) as connected:
            await self.publish(connected, 0)
            await connected.trainer.train_step(tiny_batch())  # changes the exported tensors in place
            for engine in connected.engines:
                await engine.activate(0)
                _assert_equal(engine, 0)

    async def test_engines_do_not_share_storage(self) -> None:
        async with self.connected() as connected:
            await self.publish(connected, 0)
            first, second = connected.engines
            await first.activate(0)
            await second.activate(0)
            first.weights["model.norm.weight"].fill_(7.0)
            _assert_equal(second, 0)

    async def test_one_engine_and_one_bucket_are_enough(self) -> None:
        async with self.connected(engines=1, options=RecordingOptions(tensors_per_bucket=100)) as connected:
            await self.publish(connected, 0)
            assert connected.engines[0].stream == [(0, True)]

    @pytest.mark.parametrize("bucket", [0, 2])
    async def test_a_failing_export_is_raised_and_the_next_version_arrives(self, bucket: int) -> None:
        async with self.connected(options=RecordingOptions(fail_export_at=bucket, fail_version=0)) as connected:
            error = await self.refused(connected, 0)
            assert "planned failure" in str(error), f"the cause is not in the error: {error}"
            await self._next_version_arrives(connected, 1)

    @pytest.mark.parametrize("bucket", [0, 2, BUCKETS - 1])
    async def test_a_failing_engine_is_named_and_the_next_version_arrives(self, bucket: int) -> None:
        async with self.connected(options=RecordingOptions(fail_receive=(1, bucket), fail_version=0)) as connected:
            error = await self.refused(connected, 0)
            assert "engine 1" in str(error), f"the failed engine is not in the error: {error}"
            assert "planned failure" in str(error), f"the cause is not in the error: {error}"
            await self._next_version_arrives(connected, 1)

    async def test_an_engine_that_never_receives_does_not_block_the_others(self) -> None:
        async with self.connected(dead=(0,)) as connected:
            error = await self.refused(connected, 0)
            assert "engine 0" in str(error), f"the dead engine is not in the error: {error}"

    async def test_the_same_version_can_be_tried_again(self) -> None:
        async with self.connected(options=RecordingOptions(fail_receive=(0, 1), fail_times=1)) as connected:
            await self.refused(connected, 4)
            await self._next_version_arrives(connected, 4)

    async def test_cancelling_a_publish_frees_both_ends(self) -> None:
        async with self.connected(options=RecordingOptions(export_delay_s=0.05)) as connected:
            task = asyncio.create_task(connected.transport.publish(0))
            await asyncio.sleep(0.08)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                async with asyncio.timeout(self.deadline_s):
                    await task
            assert task.cancelled(), "a cancelled publish must end as cancelled"
            await self._next_version_arrives(connected, 1)

    async def test_an_engine_that_joins_late_serves_only_once_it_holds_the_present_version(self) -> None:
        async with self.connected() as connected:
            settings = UpdateSettings(timeout_s=self.deadline_s)
            fleet = Fleet(connected.transport, connected.trainer, connected.engines, settings)
            for version in (0, 1):
                await fleet.publish(version)
            fleet.leave(connected.engines[1])
            await connected.engines[1].close()
            late = StreamEngine(RecordingOptions(), _context(1))
            await late.start()
            connected.engines[1] = late
            fleet.join(late)
            assert late not in fleet.members, "an engine without the present version is no member"
            await fleet.publish(1)  # the trainer has not moved on
            assert fleet.members == tuple(connected.engines)
            assert late.events == ["pause", "receive 1", "activate 1", "resume"], late.events
            _assert_equal(late, 1)
            await fleet.publish(2)
            for engine in connected.engines:
                _assert_equal(engine, 2)

    async def test_publishing_before_open_is_an_error(self) -> None:
        with _must_raise(TransportError, "publish before open must raise TransportError"):
            await self.make().publish(0)

    async def test_close_is_idempotent_and_ends_publishing(self) -> None:
        async with self.connected() as connected:
            await connected.transport.close()
            await connected.transport.close()
            await self.refused(connected, 0)

    async def _next_version_arrives(self, connected: Connected, version: int) -> None:
        for engine in connected.engines:
            engine.stream.clear()
        staged = await self.publish(connected, version)
        assert all(received == staged.sent for received in staged.received), (
            "the publish after a failed one is incomplete"
        )
        for engine in connected.engines:
            await engine.activate(version)
            _assert_equal(engine, version)


@contextlib.contextmanager
def _must_raise(kind: type[Exception], otherwise: str) -> Iterator[list[Exception]]:
    caught: list[Exception] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
    else:
        raise AssertionError(otherwise)


def _context(index: int) -> EngineContext:
    return EngineContext(model_path="", context_length=None, device="cpu", seed=0, index=index)


def _assert_equal(engine: RecordingEngine, version: int) -> None:
    expected = example_weights(version)
    assert engine.weights.keys() == expected.keys(), f"engine {engine.index} serves {sorted(engine.weights)}"
    differing = [name for name, t in expected.items() if digest_tensor(engine.weights[name]) != digest_tensor(t)]
    assert not differing, f"engine {engine.index} serves other values of {differing}"
