"""A run that loses a trainer rank goes back to its checkpoint, unless that happened too often of late."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from miles_core.driver import launch
from miles_core.errors import TrainerLost
from miles_core.restarts import RestartBudget


@pytest.mark.parametrize(("apart_s", "losses", "ends"), [(50.0, 9, False), (40.0, 9, True), (40.0, 2, False)])
async def test_losses_count_within_the_window_only(
    monkeypatch: pytest.MonkeyPatch, apart_s: float, losses: int, ends: bool
) -> None:
    opened: list[bool] = []

    @asynccontextmanager
    async def open_run(*_: object, resume: bool) -> AsyncIterator[Any]:
        opened.append(resume)
        yield SimpleNamespace(saved_step=1, last_step=1)

    async def watched(run: Any, loop: Any) -> None:
        loop.close()
        if len(opened) <= losses:
            raise TrainerLost("trainer rank 0 died")

    def budget(allowed: int, within_s: float) -> RestartBudget:
        return RestartBudget(allowed, within_s, clock=lambda: apart_s * len(opened))

    monkeypatch.setattr(launch, "open_run", open_run)
    monkeypatch.setattr(launch, "_watched", watched)
    monkeypatch.setattr(launch, "RestartBudget", budget)
    checkpoint = SimpleNamespace(restarts=2, restarts_within_s=100.0)
    resolved = SimpleNamespace(spec=SimpleNamespace(stall_s=60.0, checkpoint=checkpoint))
    recorder = SimpleNamespace(event=lambda *_, **__: None)
    display = SimpleNamespace(say=lambda *_, **__: None)
    work = launch._main(resolved, None, None, recorder, display, resume=False)  # type: ignore[arg-type]
    if ends:
        with pytest.raises(TrainerLost):
            await work
        assert opened == [False, True, True]
    else:
        assert await work == "finished"
        assert opened == [False] + [True] * losses
