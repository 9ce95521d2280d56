"""An event loop whose clock jumps to the next timer when nothing is ready: hours of waiting in a moment, exactly.

What a test waits for by this clock comes after all that can happen before it, however slow the machine is: a sleep says
"once everything is idle", and a deadline passes only where nothing else goes on.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 0 and stands still while callbacks run, or jobs of the loop's executor (`asyncio.to_thread`).
    Sockets, processes and other threads have no place in it."""

    def __init__(self) -> None:
        self._virtual = 0.0
        self._jobs = 0
        super().__init__()

    def time(self) -> float:
        return self._virtual

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        job = super().run_in_executor(executor, func, *args)
        self._jobs += 1
        job.add_done_callback(self._job_ended)
        return job

    def _job_ended(self, job: Any) -> None:
        self._jobs -= 1

    def _run_once(self) -> None:
        loop: Any = self
        if not loop._ready and not self._jobs:
            # Cancelled ones too are in the queue, and nothing happens at their time.
            timers = (timer._when for timer in loop._scheduled if not timer._cancelled)
            self._virtual = max(self._virtual, min(timers, default=self._virtual))
        super()._run_once()  # type: ignore[misc]


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on a `VirtualLoop`."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def in_virtual_time(test: Any) -> Any:
    """Decorate an async test, or a class of them with those it inherits, to run on a `VirtualLoop`."""
    if isinstance(test, type):
        for name, method in inspect.getmembers(test, inspect.iscoroutinefunction):
            if name.startswith("test"):
                setattr(test, name, _virtual(method))
        return test
    return _virtual(test)


def _virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        run_virtual(test(*args, **kwargs))

    return run
