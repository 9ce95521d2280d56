"""An event loop whose clock jumps to the next timer when nothing is ready: hours of waiting in a moment, exactly."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 0 and stands still while callbacks run. Threads and sockets have no place in it."""

    def __init__(self) -> None:
        self._virtual = 0.0
        super().__init__()

    def time(self) -> float:
        return self._virtual

    def _run_once(self) -> None:
        loop: Any = self
        if not loop._ready and loop._scheduled:
            self._virtual = max(self._virtual, loop._scheduled[0]._when)
        super()._run_once()  # type: ignore[misc]


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on a `VirtualLoop`."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
