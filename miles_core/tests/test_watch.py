"""A stall names its cause."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from miles_core import watch
from miles_core.testing.virtual_time import in_virtual_time


def test_waiters_are_listed_oldest_first_and_leave_no_trace() -> None:
    with watch.waiting("step 3", on="group 7"), watch.waiting("group 7", on="engine 0"):
        lines = watch.describe().splitlines()
        assert lines[0].startswith("step 3 waits for group 7")
        assert lines[1].startswith("group 7 waits for engine 0")
    assert watch.waiters() == []


@in_virtual_time
async def test_watchdog_reports_a_stall_with_its_chain_and_not_a_busy_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=asyncio.get_running_loop().time))
    monkeypatch.setattr(watch, "_last_progress", 0.0)
    reports: list[str] = []
    task = asyncio.create_task(watch.watchdog(0.2, reports.append))
    with watch.waiting("driver", on="reward worker 1"):
        for _ in range(6):
            watch.progress()
            await asyncio.sleep(0.05)
        assert reports == []
        await asyncio.sleep(0.4)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert reports
    assert "driver waits for reward worker 1" in reports[0]
