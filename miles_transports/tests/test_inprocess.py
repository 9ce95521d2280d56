"""Transport `inprocess`."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import torch

from miles_core.errors import TransportError
from miles_core.kinds.transport import Transport
from miles_core.testing.recording import RecordingOptions
from miles_core.testing.transport import TransportConformance
from miles_core.types import NamedTensor, WeightBucket
from miles_core.watch import waiters
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
    deadline = time.monotonic() + 5
    while not waiters() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert sent == [0, 1]
    assert [waiter.on for waiter in waiters()] == ["engine 0 to take one"]
    assert [b.index for b in InProcessReceiver(exchange, 0).receive(0)] == [0, 1, 2]
    thread.join(5)
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
    async with kit.connected(options=RecordingOptions(export_delay_s=0.02)) as connected:
        publishing = asyncio.create_task(kit.publish(connected, 0))
        gaps = []
        while not publishing.done():
            before = time.monotonic()
            await asyncio.sleep(0.001)
            gaps.append(time.monotonic() - before)
        await publishing
    assert len(gaps) > 20
