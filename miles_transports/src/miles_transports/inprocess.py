"""Transport `inprocess`: a bounded hand-over between the trainer's thread and the engines' threads of one process.

The sender copies each tensor once per engine before `send` returns. That copy is the point, not an oversight: exported
tensors may alias live parameters, and an engine that kept the alias would follow the next optimizer step unpublished.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from miles_core.errors import TransportError
from miles_core.kinds.engine import Engine
from miles_core.kinds.transport import Staged, WeightSource
from miles_core.types import NamedTensor, WeightBucket
from miles_core.watch import waiting
from miles_core.weights.staging import stage
from miles_transports.options import InProcessOptions


class Exchange:
    """The shared middle: one bounded line of buckets per engine, and why the present publish is over, if it is.

    One condition guards everything; whoever waits on it has released it.
    """

    def __init__(self, num_engines: int, capacity: int) -> None:
        self._capacity = capacity
        self._lines: list[deque[WeightBucket]] = [deque() for _ in range(num_engines)]
        self._changed = threading.Condition()
        self._over: str | None = "no publish has begun"

    def begin(self) -> None:
        """Empty all lines for a new publish."""
        with self._changed:
            for line in self._lines:
                line.clear()
            self._over = None

    def end(self, reason: str) -> None:
        """End the present publish: everyone who waits, or comes later, raises with the first reason given."""
        with self._changed:
            if self._over is None:
                self._over = reason
            self._changed.notify_all()

    def put(self, engine: int, bucket: WeightBucket) -> None:
        line = self._lines[engine]
        with (
            waiting(f"transport: bucket {bucket.index} of version {bucket.version}", on=f"engine {engine} to take one"),
            self._changed,
        ):
            self._changed.wait_for(lambda: self._over is not None or len(line) < self._capacity)
            self._raise_if_over()
            line.append(bucket)
            self._changed.notify_all()

    def take(self, engine: int, version: int) -> WeightBucket:
        line = self._lines[engine]
        with waiting(f"engine {engine}", on=f"the trainer's next bucket of version {version}"), self._changed:
            self._changed.wait_for(lambda: self._over is not None or len(line) > 0)
            self._raise_if_over()
            bucket = line.popleft()
            self._changed.notify_all()
            return bucket

    @property
    def num_engines(self) -> int:
        return len(self._lines)

    def _raise_if_over(self) -> None:
        if self._over is not None:
            raise TransportError("the publish is over before it is complete", found=self._over)


class InProcessSender:
    """The trainer's end."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def send(self, bucket: WeightBucket) -> None:
        for engine in range(self._exchange.num_engines):
            self._exchange.put(engine, _copied(bucket))

    def abort(self, reason: str) -> None:
        self._exchange.end(f"the trainer gave up: {reason}")

    def close(self) -> None:
        self._exchange.end("the trainer closed its end")


class InProcessReceiver:
    """One engine's end."""

    def __init__(self, exchange: Exchange, engine: int) -> None:
        self._exchange = exchange
        self._engine = engine

    def receive(self, version: int) -> Iterator[WeightBucket]:
        complete = False
        while not complete:
            bucket = self._exchange.take(self._engine, version)
            if bucket.version != version:
                raise TransportError(
                    "another version arrived", expected=f"version {version}", found=f"version {bucket.version}"
                )
            complete = bucket.last
            yield bucket

    def close(self) -> None:
        self._exchange.end(f"engine {self._engine} closed its end")


class InProcessTransport:
    """See the module; `kinds.transport.Transport`."""

    def __init__(self, options: InProcessOptions) -> None:
        self._options = options
        self._exchange: Exchange | None = None
        self._source: WeightSource | None = None
        self._engines: Sequence[Engine] = ()

    async def open(self, source: WeightSource, engines: Sequence[Engine]) -> None:
        exchange = Exchange(len(engines), self._options.buckets_in_flight)
        await source.open_sender(functools.partial(InProcessSender, exchange))
        for index, engine in enumerate(engines):
            await engine.open_receiver(functools.partial(InProcessReceiver, exchange, index))
        self._exchange, self._source, self._engines = exchange, source, tuple(engines)

    async def publish(self, version: int) -> Staged:
        if self._exchange is None or self._source is None:
            raise TransportError("the transport is not open", do="await open(source, engines) first")
        self._exchange.begin()
        try:
            return await stage(self._source, self._engines, version, abandon=self._exchange.end)
        finally:
            self._exchange.end("no publish is in progress")

    async def close(self) -> None:
        if self._exchange is not None:
            self._exchange.end("the transport is closed")
        self._exchange = self._source = None


def _copied(bucket: WeightBucket) -> WeightBucket:
    """The bucket with tensors of its own: dense, contiguous, detached."""
    tensors = tuple(
        NamedTensor(name=named.name, tensor=named.tensor.detach().clone(memory_format=torch.contiguous_format))
        for named in bucket.tensors
    )
    return replace(bucket, tensors=tensors)
