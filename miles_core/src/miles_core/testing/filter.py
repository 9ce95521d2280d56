"""Conformance kit for filters: every group is kept or dropped with a reason, which depends on the group alone.

class TestMine(FilterConformance):
    def make(self): return my_filter
    options = {"min_std": 0.1}
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from miles_core.types import Boundary, Failure, Group, Message, Prompt, Status, TokenSpan, Trajectory

FAILED = None
"""In `example_group`: a trajectory that failed and has no reward."""


def example_group(*rewards: float | None, truncated: Sequence[int] = ()) -> Group:
    """A group with these rewards; None is a failed trajectory, `truncated` names those that ended by length."""
    rows = [_row(reward, index, index in truncated) for index, reward in enumerate(rewards)]
    prompt = Prompt(id="p", messages=(Message(role="user", content="2 + 2 = ?"),), label="4")
    return Group(prompt=prompt, trajectories=tuple(rows))


def _row(reward: float | None, index: int, truncated: bool) -> Trajectory:
    status = Status.FAILED if reward is FAILED else Status.TRUNCATED if truncated else Status.COMPLETED
    length = 3 + index
    sampled = np.arange(length) >= 2
    return Trajectory(
        prompt_id="p",
        session_id=f"s{index}",
        token_ids=np.arange(length, dtype=np.int32),
        sampled=sampled,
        loss_mask=sampled,
        logprobs=np.where(sampled, np.float32(-0.5), np.float32(np.nan)).astype(np.float32),
        spans=(TokenSpan(start=2, end=length, weight_version=0),),
        temperature=1.0,
        status=status,
        failure=Failure(boundary=Boundary.ENGINE, message="gone") if reward is FAILED else None,
        reward=reward,
        messages=(Message(role="user", content="2 + 2 = ?"), Message(role="assistant", content="4")),
        metadata={"turns": 1, "sample": index, "attempt": 0},
    )


GROUPS: dict[str, Group] = {
    # Never handed out: a filter that changes a group must not change what it is compared with.
    "mixed rewards": example_group(0.0, 1.0, 0.5, 1.0),
    "equal rewards": example_group(1.0, 1.0, 1.0),
    "one failure": example_group(0.0, FAILED, 1.0),
    "failures only but one": example_group(FAILED, 1.0, FAILED),
    "failures only": example_group(FAILED, FAILED),
    "one trajectory": example_group(0.5),
    "all truncated": example_group(0.0, 1.0, truncated=(0, 1)),
    "negative and large": example_group(-1e6, 1e6),
}


class FilterConformance:
    """Subclass it and say how to make the filter."""

    options: ClassVar[Mapping[str, Any]] = {}
    """Keyword arguments of every call."""
    judges_failures = False
    """The filter is about failures; else a failed trajectory must not change its verdict on the others."""

    def make(self) -> Callable[..., Any]:
        raise NotImplementedError

    def _verdict(self, group: Group) -> Any:
        return self.make()(group, **self.options)

    @pytest.mark.parametrize("name", GROUPS)
    def test_every_group_gets_a_verdict(self, name: str) -> None:
        verdict = self._verdict(copy.deepcopy(GROUPS[name]))
        fits = verdict is None or (isinstance(verdict, str) and re.fullmatch(r"[a-z][a-z0-9_]*", verdict))
        assert fits, f"{name}: {verdict!r} is neither None (keep) nor a short snake_case reason (drop)"

    def test_the_verdict_depends_on_the_group_alone(self) -> None:
        judge = self.make()
        groups = copy.deepcopy(GROUPS)
        first = {name: judge(group, **self.options) for name, group in groups.items()}
        groups = copy.deepcopy(GROUPS)
        second = {name: judge(group, **self.options) for name, group in reversed(groups.items())}
        changed = [name for name in GROUPS if first[name] != second[name]]
        assert not changed, f"another verdict the second time: {changed}; groups are judged again after a resume"

    @pytest.mark.parametrize("name", GROUPS)
    def test_the_group_is_left_as_it_is(self, name: str) -> None:
        group = copy.deepcopy(GROUPS[name])
        self.make()(group, **self.options)
        for before, after in zip(GROUPS[name].trajectories, group.trajectories, strict=True):
            same = before.reward == after.reward and np.array_equal(before.loss_mask, after.loss_mask)
            assert same, f"{name}: the filter changed a trajectory; it may only judge"

    def test_a_failure_is_no_reward_of_zero(self) -> None:
        if self.judges_failures:
            pytest.skip("the filter is about failures")
        for rewards in ((1.0, 1.0, 1.0), (0.0, 1.0, 0.5)):
            alone, beside = self._verdict(example_group(*rewards)), self._verdict(example_group(*rewards, FAILED))
            assert alone == beside, f"rewards {rewards}: {alone!r}, with a failed trajectory beside them {beside!r}"
