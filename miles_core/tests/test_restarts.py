"""Restarts are counted within a window that moves, on a clock of the test."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from miles_core.restarts import RestartBudget


def test_spread_out_faults_are_never_too_many_and_close_ones_are() -> None:
    now = 0.0
    budget = RestartBudget(3, 3600.0, clock=lambda: now)
    for _ in range(1000):
        assert budget.wait_s() == 0.0
        budget.count()
        now += 1200.0
    assert budget.total == 1000
    now -= 1199.0  # a fourth within the hour
    assert budget.wait_s() == 1199.0
    now += 1199.0
    assert budget.wait_s() == 0.0


def test_without_any_restart_it_is_never_time_for_one() -> None:
    assert RestartBudget(0, 1.0).wait_s() == math.inf


@given(st.lists(st.floats(0, 50, allow_subnormal=False)), st.integers(0, 4), st.floats(1, 100))
def test_no_window_ever_holds_more_than_are_allowed(gaps: list[float], allowed: int, within_s: float) -> None:
    now, taken = 0.0, []
    budget = RestartBudget(allowed, within_s, clock=lambda: now)
    for gap in gaps:
        now += gap
        recent = [at for at in taken if at + within_s > now]
        assert (budget.wait_s() == 0.0) == (len(recent) < allowed), "it refuses when the window is full, and only then"
        if budget.wait_s() == 0.0:
            budget.count()
            taken.append(now)
