"""One signal asks, two stop."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from miles_core.driver.signals import stop_on_signals


async def test_first_signal_asks_and_second_cancels() -> None:
    said: list[str] = []
    started = asyncio.Event()

    async def work() -> None:
        started.set()
        await asyncio.sleep(30)

    main = asyncio.create_task(work())
    await started.wait()
    with stop_on_signals(main, said.append) as request:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.05)
        assert request.requested
        assert not main.done()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(asyncio.CancelledError):
            await main
        assert request.now
    assert len(said) == 2
    assert "again" in said[0]
