"""Filters that are wrong in one way each."""

from dataclasses import replace

from miles_core.testing.filter import FilterConformance


def zero_std(group):
    """Sound."""
    return "zero_std" if len({t.reward for t in group.trainable}) <= 1 else None


class Faulty(FilterConformance):
    pass


class TestAnswersWithABool(Faulty):
    def make(self):
        return lambda group: zero_std(group) is None

    caught_by = {"test_every_group_gets_a_verdict": "neither None (keep) nor a short snake_case reason"}


class TestReasonIsASentence(Faulty):
    def make(self):
        return lambda group: zero_std(group) and "All rewards are equal!"

    caught_by = {"test_every_group_gets_a_verdict": "neither None (keep) nor a short snake_case reason"}


class TestDividesByTheNumberScored(Faulty):
    def make(self):
        def mean_too_low(group):
            rewards = [t.reward for t in group.trainable]
            return "low_mean" if sum(rewards) / len(rewards) < -1e9 else None

        return mean_too_low

    caught_by = {
        "test_every_group_gets_a_verdict": "ZeroDivisionError",
        "test_the_verdict_depends_on_the_group_alone": "ZeroDivisionError",
        "test_the_group_is_left_as_it_is": "ZeroDivisionError",
    }


class TestCountsFailuresAsZero(Faulty):
    def make(self):
        return lambda group: None if len({t.reward or 0.0 for t in group.trajectories}) > 1 else "zero_std"

    caught_by = {"test_a_failure_is_no_reward_of_zero": "with a failed trajectory beside them"}


class TestKeepsEveryOtherGroup(Faulty):
    def make(self):
        seen = []

        def every_other(group):
            seen.append(group)
            return "odd" if len(seen) % 2 else None

        return every_other

    caught_by = {"test_the_verdict_depends_on_the_group_alone": "another verdict the second time"}


class TestClipsTheRewards(Faulty):
    def make(self):
        def clip(group):
            clipped = [
                replace(t, reward=None if t.reward is None else max(-1.0, min(1.0, t.reward)))
                for t in group.trajectories
            ]
            object.__setattr__(group, "trajectories", tuple(clipped))
            return zero_std(group)

        return clip

    caught_by = {
        "test_the_group_is_left_as_it_is": "it may only judge",
    }
