"""Who waits for whom, since when: so that a stall names its cause instead of a time-out far from it.

Everything in this process that may wait long wraps the wait:

    with waiting("group 3 of step 12", on="engine local"):
        chunk = await anext(chunks)

and everything that gets somewhere calls `progress()`. When nothing progressed for a while, `describe()` lists the
waiters, oldest first. One register per process, like logging; a wait that has ended leaves no trace.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Waiter:
    who: str
    on: str
    since: float
    """time.monotonic() seconds"""


_lock = threading.Lock()  # waiters register from the event loop and from worker threads
_waiters: dict[int, Waiter] = {}
_keys = itertools.count()
_last_progress = time.monotonic()


@contextlib.contextmanager
def waiting(who: str, *, on: str) -> Iterator[None]:
    """Register that `who` waits for `on` for as long as the block runs."""
    key = next(_keys)
    with _lock:
        _waiters[key] = Waiter(who, on, time.monotonic())
    try:
        yield
    finally:
        with _lock:
            _waiters.pop(key, None)


def progress() -> None:
    """Say that something got somewhere; resets the stall clock."""
    global _last_progress
    _last_progress = time.monotonic()


def idle_s() -> float:
    """Seconds since the last progress."""
    return time.monotonic() - _last_progress


def waiters() -> list[Waiter]:
    """All current waiters, oldest first."""
    with _lock:
        return sorted(_waiters.values(), key=lambda waiter: waiter.since)


def describe(limit: int = 20) -> str:
    """The chain of waiters as text, one a line, oldest first."""
    now = time.monotonic()
    found = waiters()
    lines = [f"{w.who} waits for {w.on} since {now - w.since:.0f} s" for w in found[:limit]]
    if len(found) > limit:
        lines.append(f"… and {len(found) - limit} more")
    return "\n".join(lines) or "nobody waits; the event loop or a worker thread is busy or blocked"


async def watchdog(stall_s: float, report: Callable[[str], None]) -> None:
    """Call `report` with the chain of waiters each time nothing progressed for `stall_s` seconds; runs until
    cancelled."""
    reported_at = 0.0
    while True:
        await asyncio.sleep(min(1.0, stall_s / 4))
        if idle_s() < stall_s:
            reported_at = 0.0
        elif time.monotonic() - reported_at >= stall_s:
            reported_at = time.monotonic()
            report(f"no progress for {idle_s():.0f} s\n{describe()}")
