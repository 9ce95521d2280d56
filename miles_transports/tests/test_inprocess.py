"""Transport `inprocess`."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from dataclasses import replace

import pytest
import torch

from miles_core.errors import TransportError
from miles_core.kinds.transport import Transport
from miles_core.testing.transport import BUCKETS, StreamEngine, TransportConformance
from miles_core.types import NamedTensor, WeightBucket, WeightManifest
from miles_core.watch import waiters
from miles_core.weights.equality import check_weight_update_equal
from miles_core.weights.lifecycle import publish
from miles_transports.inprocess import Exchange, InProcessReceiver, InProcessSender, InProcessTransport
from miles_transports.options import InProcessOptions


class TestInProcess(TransportConformance):
    def make(self) -> Transport:
        return InProcessTransport(InProcessOptions())


class TestInProcessWithOneBucketInFlight(TransportConformance):
    def make(self) -> Transport:
        return InProcessTransport(InProcessOptions(buckets_in_flight=1))


def bucket(index: int, *, version: int = 0, last: bool = False) -> WeightBucket:
    return WeightBucket(version=version, index=index, last=last, tensors=(NamedTensor(name="w", tensor=torch.ones(2)),))


def test_the_sender_waits_once_the_line_is_full_and_says_for_whom() -> None:
    exchange = Exchange(num_engines=1, capacity=2)
    exchange.begin()
    sender = InProcessSender(exchange)
    sent: list[int] = []

    def send() -> None:
        for index in range(3):
            sender.send(bucket(index, last=index == 2))
            sent.append(index)

    thread = threading.Thread(target=send)
    thread.start()
    deadline = time.monotonic() + 60
    while not waiters() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert sent == [0, 1]
    assert [waiter.on for waiter in waiters()] == ["engine 0 to take one"]
    assert [b.index for b in InProcessReceiver(exchange, 0).receive(0)] == [0, 1, 2]
    thread.join(60)
    assert sent == [0, 1, 2]


def test_another_version_is_not_taken_for_the_one_asked_for() -> None:
    exchange = Exchange(num_engines=1, capacity=2)
    exchange.begin()
    InProcessSender(exchange).send(bucket(0, version=1))
    with pytest.raises(TransportError, match="version 2"):
        next(InProcessReceiver(exchange, 0).receive(2))


def test_buckets_of_an_abandoned_publish_do_not_leak_into_the_next() -> None:
    exchange = Exchange(num_engines=1, capacity=4)
    exchange.begin()
    sender = InProcessSender(exchange)
    sender.send(bucket(0))
    sender.abort("out of memory")
    with pytest.raises(TransportError, match="out of memory"):
        next(InProcessReceiver(exchange, 0).receive(0))
    exchange.begin()
    sender.send(bucket(7, last=True))
    assert [b.index for b in InProcessReceiver(exchange, 0).receive(0)] == [7]


async def test_the_event_loop_stays_live_while_buckets_move() -> None:
    kit = TestInProcessWithOneBucketInFlight()
    loop, answered = asyncio.get_running_loop(), list[int]()

    def ask_the_loop(bucket: WeightBucket) -> None:
        answer = threading.Event()
        loop.call_soon_threadsafe(answer.set)
        assert answer.wait(60), "the event loop stands still"
        answered.append(bucket.index)

    async with kit.connected(engines=1) as connected:
        connected.engines[0].taken = ask_the_loop  # type: ignore[method-assign]
        await kit.publish(connected, 0)
    assert answered == list(range(BUCKETS))


class Forgiving(StreamEngine):
    """Keeps its old value of whatever does not arrive, as a careless engine does."""

    async def receive(self, version: int) -> WeightManifest:
        self.weights.pop("model.norm.weight", None)
        return await super().receive(version)


async def test_a_tensor_lost_on_the_way_is_named_even_when_the_engines_do_not_miss_it() -> None:
    class Loses(InProcessSender):
        def send(self, bucket: WeightBucket) -> None:
            kept = tuple(named for named in bucket.tensors if named.name != "model.norm.weight")
            super().send(replace(bucket, tensors=kept))

    kit = TestInProcess()
    async with kit.connected(engines=1) as connected:
        transport = connected.transport
        assert isinstance(transport, InProcessTransport)
        assert transport._exchange is not None
        await connected.trainer.open_sender(functools.partial(Loses, transport._exchange))
        connected.engines[0].__class__ = Forgiving
        for check in (
            lambda: publish(transport, connected.engines, 0),
            lambda: check_weight_update_equal(
                functools.partial(publish, transport, connected.engines), connected.engines, 0, seed=1
            ),
        ):
            with pytest.raises(TransportError, match=r"engine 0: 1 missing: model\.norm\.weight"):
                await check()
            assert await connected.engines[0].version() == -1
