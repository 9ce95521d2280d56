"""Verdicts on queues and idle shares, and the forecast of one more version of lag."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.tracking.verdict import Outlook, Verdict, duration, forecast, judge, verdict_of_steps


def figures(
    *, fill: float, trainer: float, engine: float = 0.0, blocked: float = 0.0, stale: float = 0
) -> dict[str, float]:
    return {
        "async/queue_fill": fill,
        "async/trainer_idle_fraction": trainer,
        "async/engine_idle_fraction": engine,
        "async/blocked_fraction": blocked,
        "async/stale": stale,
        "async/trained": 100.0,
    }


@pytest.mark.parametrize(
    ("found", "verdict", "words"),
    [
        (figures(fill=0.02, trainer=0.6), Verdict.ROLLOUT_BOUND, "the trainer waits 60%"),
        (figures(fill=0.98, trainer=0.0, engine=0.5, blocked=0.5), Verdict.TRAINER_BOUND, "back 50% of the time"),
        (figures(fill=0.5, trainer=0.03, engine=0.04, blocked=0.02), Verdict.BALANCED, "waits 3%"),
        (figures(fill=0.9, trainer=0.0, blocked=0.8, stale=25), Verdict.STALE, "20% of the finished groups"),
    ],
)
def test_the_queue_and_the_idle_shares_give_a_verdict(found: dict[str, float], verdict: Verdict, words: str) -> None:
    state = judge(found)
    assert state is not None
    assert state.verdict is verdict
    assert words in state.sentence


def test_a_rollout_that_the_limit_on_age_holds_back_is_not_told_to_add_engines() -> None:
    state = judge({**figures(fill=0.0, trainer=0.7), "async/limited_fraction": 0.6})
    assert state is not None
    assert "max_weight_staleness holds the rollout back 60%" in state.sentence
    assert "add engines" not in state.sentence


def test_a_run_in_turns_has_no_verdict() -> None:
    assert judge({"time/step_s": 3.0}) is None
    assert verdict_of_steps([{"step": 1}], [{"step": 1}]) is None


def test_the_verdict_of_several_steps_is_that_of_their_means_and_the_last_counts() -> None:
    timings = [
        {
            name: value
            for name, value in figures(fill=0.1, trainer=share).items()
            if name.split("/")[1] not in ("stale", "trained")
        }
        for share in (0.0, 0.4)
    ]
    counts = [{"async/stale": 50.0, "async/trained": 1.0}, {"async/stale": 0.0, "async/trained": 9.0}]
    state = verdict_of_steps(counts, timings)
    assert state is not None
    assert state.verdict is Verdict.ROLLOUT_BOUND
    assert "20%" in state.sentence


def test_pipelines_by_hand() -> None:
    assert duration([2, 2, 2], [3, 3, 3], lag=0) == 15  # in turns
    assert duration([2, 2, 2], [3, 3, 3], lag=1) == 11  # the first batch, then the trainer never waits
    assert duration([1, 9, 1, 1], [3, 3, 3, 3], lag=1) == 1 + 9 + 3 * 3
    assert duration([], [], lag=0) == 0


@given(st.lists(st.tuples(st.floats(0.1, 9), st.floats(0.1, 9)), min_size=1, max_size=20), st.integers(0, 4))
def test_more_lag_never_costs_time_and_never_beats_the_slower_side(steps: list[tuple[float, float]], lag: int) -> None:
    generate, train = [g for g, _ in steps], [t for _, t in steps]
    now, more = duration(generate, train, lag=lag), duration(generate, train, lag=lag + 1)
    assert more <= now + 1e-9
    assert more >= max(sum(generate), sum(train)) - 1e-9
    found = forecast(generate, train, lag=lag, kl=0.01, ess=0.9, staleness=1.0)
    assert found.throughput >= 1 - 1e-9
    assert found.kl == pytest.approx(0.04)
    assert found.ess == pytest.approx(0.9**4)


def test_what_lag_costs_is_unknown_before_anything_was_stale() -> None:
    found = forecast([2.0] * 4, [2.0] * 4, lag=0, kl=0.0, ess=1.0, staleness=0.0)
    assert (found.kl, found.ess) == (None, None)
    assert str(found) == "one more version of lag: +60% steps/h"


def test_what_was_not_measured_is_not_forecast() -> None:
    outlook = Outlook()
    for _ in range(4):
        metrics = {"contract/versions/token_staleness": 1.0, "contract/versions/s_old_max": 1.0}
        outlook.step(metrics, {"async/generate_s": 3.0, "time/train_s": 2.0})
    found = outlook.forecast()
    assert found is not None
    assert (found.kl, found.ess) == (None, None)
    assert "effective" not in str(found)
    assert "KL" not in str(found)
