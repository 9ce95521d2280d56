"""Filters of core, on groups with failures in them."""

from __future__ import annotations

import numpy as np
import pytest

from miles_core.rollout.filters import no_failures, nonzero_std
from miles_core.types import Boundary, Failure, Group, Message, Prompt, Status, TokenSpan, Trajectory


def trajectory(reward: float | None, status: Status = Status.COMPLETED) -> Trajectory:
    failure = Failure(boundary=Boundary.ENGINE, message="gone") if status is Status.FAILED else None
    return Trajectory(
        prompt_id="p",
        session_id="s",
        token_ids=np.array([1, 2], np.int32),
        sampled=np.array([False, True]),
        loss_mask=np.array([False, True]),
        logprobs=np.array([np.nan, -1.0], np.float32),
        spans=(TokenSpan(start=1, end=2, weight_version=0),),
        temperature=1.0,
        status=status,
        failure=failure,
        reward=reward,
    )


def group(*rewards: float | None) -> Group:
    rows = [trajectory(reward, Status.FAILED if reward is None else Status.COMPLETED) for reward in rewards]
    return Group(prompt=Prompt(id="p", messages=(Message(role="user", content="q"),)), trajectories=tuple(rows))


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ((0.0, 1.0), None),
        ((0.5, 0.5, 0.5), "zero_std"),
        ((0.1,) * 7, "zero_std"),  # the mean of seven 0.1 is not 0.1
        ((1.0, None, None), "zero_std"),
        ((1.0, None, 1.0), "zero_std"),
        ((1.0, None, 0.0), None),
        ((None, None), "zero_std"),
    ],
)
def test_groups_without_signal_are_dropped(rewards: tuple[float | None, ...], reason: str | None) -> None:
    assert nonzero_std(group(*rewards)) == reason


def test_the_threshold_is_the_population_standard_deviation() -> None:
    wide = group(0.0, 0.2)  # std 0.1
    assert nonzero_std(wide, min_std=0.099) is None
    assert nonzero_std(wide, min_std=0.101) == "zero_std"


def test_a_truncated_answer_counts_like_any_other() -> None:
    rows = (trajectory(1.0), trajectory(0.0, Status.TRUNCATED))
    assert nonzero_std(Group(prompt=Prompt(id="p", messages=()), trajectories=rows)) is None


def test_groups_with_failures_can_be_dropped_whole() -> None:
    assert no_failures(group(1.0, 0.0)) is None
    assert no_failures(group(1.0, None)) == "has_failures"
    aborted = Group(prompt=Prompt(id="p", messages=()), trajectories=(trajectory(None, Status.ABORTED),))
    assert no_failures(aborted) == "has_failures"
