"""The constant-reward alarm."""

from __future__ import annotations

import json

from miles_core.rollout.alarm import ConstantRewardAlarm


def test_one_reward_everywhere_for_several_steps_raises_the_alarm() -> None:
    alarm = ConstantRewardAlarm(steps=3)
    assert [alarm.observe([0.0, 0.0]) is not None for _ in range(7)] == [False, False, True, False, False, True, False]


def test_a_different_reward_starts_over() -> None:
    alarm = ConstantRewardAlarm(steps=2)
    assert alarm.observe([0.0]) is None
    assert alarm.observe([0.0, 1.0]) is None
    assert alarm.observe([0.0]) is None
    assert alarm.observe([1.0]) is None  # constant within each step, but not over both
    assert "1 for every trajectory of the last 2 steps" in str(alarm.observe([1.0]))


def test_a_step_without_rewards_says_nothing() -> None:
    alarm = ConstantRewardAlarm(steps=1)
    assert alarm.observe([]) is None


def test_zero_steps_is_off() -> None:
    assert ConstantRewardAlarm(steps=0).observe([1.0]) is None


def test_the_streak_survives_a_resume() -> None:
    first = ConstantRewardAlarm(steps=2)
    first.observe([1.0])
    second = ConstantRewardAlarm(steps=2)
    second.restore(json.loads(json.dumps(first.state())))
    assert second.observe([1.0]) is not None
