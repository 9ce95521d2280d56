"""Ctrl-C once: finish the step, save, stop. Ctrl-C twice: stop now. SIGTERM acts like the first Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator


class StopRequest:
    """Whether the run was asked to stop. The loops look between steps."""

    def __init__(self) -> None:
        self.now = False
        self._asked = asyncio.Event()

    @property
    def requested(self) -> bool:
        return self._asked.is_set()

    def ask(self) -> None:
        """Ask the run to stop."""
        self._asked.set()

    async def wait(self) -> None:
        """Return once the run was asked to stop; for loops that may wait long within a step."""
        await self._asked.wait()


@contextlib.contextmanager
def stop_on_signals(main: asyncio.Task[object], say: Callable[[str], None]) -> Iterator[StopRequest]:
    """Install handlers on the running loop; cancel `main` at the second signal."""
    request = StopRequest()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if not request.requested:
            request.ask()
            say("stopping: this step is finished and saved first; press Ctrl-C again to stop now without saving")
        else:
            request.now = True
            say("stopping now; the last checkpoint stands")
            main.cancel()

    handled = (signal.SIGINT, signal.SIGTERM)
    for number in handled:
        loop.add_signal_handler(number, on_signal)
    try:
        yield request
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
