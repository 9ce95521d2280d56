"""Wait in a test until something has become true, instead of sleeping for as long as it takes on one machine."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable


async def until(holds: Callable[[], object], what: str = "the condition", *, deadline_s: float = 60.0) -> None:
    """Let the event loop go on until `holds()` is true; on a `VirtualLoop`, in its time.

    Raises:
        AssertionError: it was not true within `deadline_s`; the message says `what` was awaited.
    """
    try:
        async with asyncio.timeout(deadline_s):
            while not holds():  # noqa: ASYNC110 - a test looks from outside, where no event is set
                await asyncio.sleep(0.001)
    except TimeoutError:
        raise AssertionError(f"waited {deadline_s:g} s in vain for {what}") from None


def wait_until(
    holds: Callable[[], object], process: subprocess.Popen[bytes], show: Callable[[], str], *, deadline_s: float = 240.0
) -> None:
    """Wait until `holds()` is true of what `process` does.

    Raises:
        AssertionError: the process ended before, or `deadline_s` passed; the message is `show()`, such as its output.
    """
    deadline = time.monotonic() + deadline_s
    while not holds():
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(show())
        time.sleep(0.05)
