"""Adds up seconds by name, over many short stretches."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Stopwatch:
    """Adds up how long each named part took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Add the time of the block to `name`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def timed(self, name: str, items: Iterable[T]) -> Iterator[T]:
        """Yield the items. The time to make each is added to `name`; the time to use it is not."""
        iterator = iter(items)
        while True:
            with self.running(name):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item
