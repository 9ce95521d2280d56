"""Contracts 2 and 3, on batches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from miles_core.contracts import logprobs, routes
from miles_core.contracts.report import Verdict
from miles_core.contracts.versions import fresh_tokens
from miles_core.kinds.backend import RouteCounts
from miles_core.types import RouteMode, TrainBatch


def batch(**changes: Any) -> TrainBatch:
    """Two sequences of three tokens, the last two of each trained."""
    mask = np.array([False, True, True] * 2)
    fields: dict[str, Any] = {
        "lengths": np.array([3, 3]),
        "group_ids": np.array([0, 0]),
        "rewards": np.zeros(2, dtype=np.float32),
        "temperatures": np.ones(2, dtype=np.float32),
        "token_ids": np.arange(6, dtype=np.int32),
        "loss_mask": mask,
        "rollout_logprobs": np.where(mask, np.log(0.4), 0.0).astype(np.float32),
        "versions": np.where(mask, 0, -1),
        "advantages": np.zeros(6, dtype=np.float32),
        "token_weights": np.zeros(6, dtype=np.float32),
        "correction_weights": np.ones(6, dtype=np.float32),
    }
    return TrainBatch(**{**fields, **changes})


def old(*probabilities: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Trainer's probabilities of the four trained tokens; prompt tokens get values that must not count."""
    values = np.full(6, -7.0)
    values[[1, 2, 4, 5]] = np.log(probabilities)
    return values.astype(np.float32)


# --- log-probs --------------------------------------------------------------------------------------------------------


def test_equal_log_probs_are_a_perfect_contract() -> None:
    report = logprobs.check(batch(old_logprobs=old(0.4, 0.4, 0.4, 0.4)))
    assert report.status is Verdict.OK
    assert report.metrics["contract/logprobs/abs_diff_max"] == 0
    assert report.metrics["contract/logprobs/ratio_mean"] == 1


def test_the_numbers_are_those_of_trained_tokens_only() -> None:
    # 0.44 for 0.40 is the ratio 1.1; 0.88 is 2.2, outside [0, 2].
    report = logprobs.check(batch(old_logprobs=old(0.44, 0.4, 0.4, 0.88)), max_mean_abs_diff=1.0)
    d = [math.log(1.1), 0, 0, math.log(2.2)]
    expected = {
        "abs_diff_mean": sum(d) / 4,
        "abs_diff_max": d[3],
        "kl_k1": -sum(d) / 4,
        "kl_k3": sum(math.exp(x) - 1 - x for x in d) / 4,
        "ratio_mean": (1.1 + 1 + 1 + 2.2) / 4,
        "ratio_min": 1.0,
        "ratio_max": 2.2,
        "ratio_outside_fraction": 0.25,
    }
    found = {name: value for name, value in report.metrics.items() if "ratio_bin" not in name and "fresh" not in name}
    assert found == pytest.approx({f"contract/logprobs/{k}": v for k, v in expected.items()}, abs=1e-6)


def test_the_histogram_counts_every_trained_token_once_and_a_bin_holds_its_lower_edge() -> None:
    # Ratios 1.1, 1, 0.25 and 2.
    report = logprobs.check(batch(old_logprobs=old(0.44, 0.4, 0.1, 0.8)))
    bins = {n.rsplit("/", 1)[1]: v for n, v in report.metrics.items() if "/ratio_bin/" in n}
    assert sum(bins.values()) == 1
    assert {name: value for name, value in bins.items() if value} == {
        "1.05_to_1.25": 0.25,
        "0.99_to_1.01": 0.25,
        "to_0.5": 0.25,
        "over_2": 0.25,
    }


def test_staleness_is_another_contract_so_fresh_tokens_are_judged_where_there_are_any() -> None:
    versions = np.array([-1, 3, 2, -1, 3, 1])
    moved = batch(old_logprobs=old(0.4, 0.1, 0.41, 0.1), versions=versions)  # only the stale ones differ
    assert logprobs.check(moved).status is Verdict.BROKEN
    report = logprobs.check(moved, fresh=versions == 3)
    assert report.status is Verdict.OK
    assert report.metrics["contract/logprobs/fresh_fraction"] == 0.5
    assert report.metrics["contract/logprobs/abs_diff_mean_fresh"] == pytest.approx(math.log(0.41 / 0.4) / 2, rel=1e-5)
    nothing_fresh = logprobs.check(moved, fresh=versions == 4)
    assert nothing_fresh.status is Verdict.UNAVAILABLE
    assert nothing_fresh.metrics["contract/logprobs/abs_diff_mean"] > 0.1
    assert "contract/logprobs/abs_diff_mean_fresh" not in nothing_fresh.metrics


def test_a_promise_of_equality_is_broken_by_one_fresh_token_and_by_no_stale_one() -> None:
    versions = np.array([-1, 3, 2, -1, 3, 1])
    stale_moved = batch(old_logprobs=old(0.4, 0.1, 0.4, 0.1), versions=versions)
    report = logprobs.check(stale_moved, fresh=versions == 3, exact=True)
    assert report.status is Verdict.OK
    assert report.metrics["contract/logprobs/abs_diff_max_fresh"] == 0.0
    one_off = batch(old_logprobs=old(0.4, 0.1, np.float32(0.4) * np.float32(1 + 1e-6), 0.1), versions=versions)
    assert logprobs.check(one_off, fresh=versions == 3).status is Verdict.OK
    report = logprobs.check(one_off, fresh=versions == 3, exact=True)
    assert report.status is Verdict.BROKEN
    assert 0 < report.metrics["contract/logprobs/abs_diff_max_fresh"] < 1e-5
    assert report.offenders
    assert logprobs.check(stale_moved, fresh=versions == 4, exact=False).status is Verdict.UNAVAILABLE


def test_a_large_mean_difference_is_broken_and_names_the_worst_sequence() -> None:
    report = logprobs.check(batch(old_logprobs=old(0.4, 0.4, 0.1, 0.1)))
    assert report.status is Verdict.BROKEN
    assert report.offenders[0].startswith("sequence 1: mean |difference| 1.386")


def test_nan_is_broken() -> None:
    assert logprobs.check(batch(old_logprobs=old(math.nan, 0.4, 0.4, 0.4))).status is Verdict.BROKEN


def test_nothing_is_measured_when_the_rollout_is_the_old_policy() -> None:
    same = batch(old_logprobs=batch().rollout_logprobs)
    assert logprobs.check(same, old_is_rollout=True).status is Verdict.UNAVAILABLE
    assert logprobs.check(same, old_is_rollout=True).figures == {"contract/logprobs/available": 0.0}
    assert logprobs.check(batch()).status is Verdict.UNAVAILABLE


# --- routes -----------------------------------------------------------------------------------------------------------


def experts(*pairs: tuple[int, int]) -> np.ndarray[Any, np.dtype[np.int16]]:
    return np.array(pairs, dtype=np.int16).reshape(6, 1, 2)


SOUND = experts((2, 7), (1, 2), (0, 0), (3, 4), (5, 6), (0, 0))


def test_dense_models_have_no_routes_to_agree_on() -> None:
    assert routes.check(batch(), num_experts=None).status is Verdict.NOT_APPLICABLE


AGREED = RouteCounts(recorded=4, unrecorded=0, own_differs=0, used_differs=0)
SAME = {"contract/routes/different_fraction": 0.0, "contract/routes/own_different_fraction": 0.0}


def test_unused_rows_of_last_tokens_do_not_count() -> None:
    report = routes.check(batch(routes=SOUND), num_experts=8, mode="replay", counts=AGREED)
    assert report.status is Verdict.OK
    assert report.metrics == {"contract/routes/coverage": 1.0, "contract/routes/unrecorded_tokens": 0.0, **SAME}


def test_sound_records_that_no_scoring_pass_compared_are_no_verdict() -> None:
    report = routes.check(batch(routes=SOUND), num_experts=8, mode="replay")
    assert report.status is Verdict.UNAVAILABLE
    assert report.figures["contract/routes/available"] == 0.0
    assert report.metrics == {"contract/routes/coverage": 1.0, "contract/routes/unrecorded_tokens": 0.0}


def test_replay_that_nobody_recorded_is_broken_and_without_replay_unavailable() -> None:
    assert routes.check(batch(), num_experts=8, mode="replay").status is Verdict.BROKEN
    assert routes.check(batch(), num_experts=8).status is Verdict.UNAVAILABLE


@pytest.mark.parametrize(
    ("pair", "says"), [((2, 8), "outside"), ((-2, 2), "outside"), ((-1, 2), "outside"), ((3, 3), "twice")]
)
def test_impossible_experts_are_broken(pair: tuple[int, int], says: str) -> None:
    damaged = SOUND.copy()
    damaged[4, 0] = pair
    report = routes.check(batch(routes=damaged), num_experts=8)
    assert report.status is Verdict.BROKEN
    assert report.metrics["contract/routes/coverage"] == 0.75
    assert report.offenders[0].startswith("sequence 1, token 1:")
    assert says in report.offenders[0]


def test_unrecorded_rows_are_counted_and_break_nothing() -> None:
    partly = SOUND.copy()
    partly[[1, 5]] = -1
    report = routes.check(batch(routes=partly), num_experts=8, mode="replay", counts=AGREED)
    assert report.status is Verdict.OK
    assert report.metrics == {"contract/routes/coverage": 0.75, "contract/routes/unrecorded_tokens": 1.0, **SAME}


@pytest.mark.parametrize("mode", ["record", "replay"])
def test_routes_without_a_single_record_are_broken(mode: RouteMode) -> None:
    counts = RouteCounts(recorded=0, unrecorded=4, own_differs=0, used_differs=0)
    report = routes.check(batch(routes=np.full_like(SOUND, -1)), num_experts=8, mode=mode, counts=counts)
    assert report.status is Verdict.BROKEN
    assert "no token's experts were recorded" in report.offenders[0]


@pytest.mark.parametrize(
    ("mode", "used", "verdict"),
    [("replay", 0, "ok"), ("replay", 1, "broken"), ("record", 10, "ok"), ("record", 40, "broken")],
)
def test_other_experts_break_replay_at_once_and_recording_when_they_are_many(
    mode: RouteMode, used: int, verdict: str
) -> None:
    counts = RouteCounts(recorded=100, unrecorded=3, own_differs=40, used_differs=used)
    report = routes.check(batch(routes=SOUND), num_experts=8, mode=mode, counts=counts)
    assert report.status == verdict
    assert report.metrics["contract/routes/different_fraction"] == used / 100
    assert report.metrics["contract/routes/own_different_fraction"] == 0.4


@pytest.mark.parametrize(("mode", "used", "verdict"), [("record", 40, "unavailable"), ("replay", 1, "broken")])
def test_a_router_that_has_learnt_since_breaks_only_replay(mode: RouteMode, used: int, verdict: str) -> None:
    counts = RouteCounts(recorded=100, unrecorded=3, own_differs=40, used_differs=used)
    fresh = np.array([False, True, True, False, True, False])
    report = routes.check(batch(routes=SOUND), num_experts=8, mode=mode, counts=counts, fresh=fresh)
    assert report.status == verdict
    assert report.metrics["contract/routes/different_fraction"] == used / 100


def test_tokens_over_the_keys_of_older_weights_are_not_fresh() -> None:
    versions = np.array([-1, 3, 2, -1, 3, 3])  # the first row went through an update
    mixed = batch(versions=versions)
    assert fresh_tokens(mixed, 3).tolist() == [False, True, False, False, True, True]
    assert fresh_tokens(mixed, 3, mixed_keys=True).tolist() == [False] * 4 + [True] * 2
