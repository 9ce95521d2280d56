"""Wrong advantages, each with one fault. The kit must catch every one."""

from __future__ import annotations

import torch
from torch import Tensor

from miles_core.algorithms.advantages import dr_grpo, grpo
from miles_core.kinds.advantage import AdvantageInputs
from miles_core.testing.advantage import AdvantageConformance


def _by_group(inputs: AdvantageInputs, divide: bool, eps: float) -> Tensor:
    result = torch.zeros_like(inputs.rewards)
    for group in inputs.group_ids.unique():
        here = inputs.group_ids == group
        rewards = inputs.rewards[here]
        centred = rewards - rewards.mean()
        result[here] = centred / (rewards.std(correction=1 if len(rewards) > 1 else 0) + eps) if divide else centred
    return torch.where(inputs.mask, result[inputs.sequence_ids], 0.0)


def divides_by_zero_deviation(inputs: AdvantageInputs, /) -> Tensor:
    """0 / 0 for a group whose rewards are all equal."""
    return _by_group(inputs, divide=True, eps=0.0)


def divides_by_the_deviation_of_one(inputs: AdvantageInputs, /) -> Tensor:
    """The unbiased deviation of a single trajectory is NaN."""
    result = torch.zeros_like(inputs.rewards)
    for group in inputs.group_ids.unique():
        here = inputs.group_ids == group
        rewards = inputs.rewards[here]
        deviation = rewards.std() if len(rewards) > 1 else torch.tensor(torch.nan)
        if len(rewards) == 1 or (rewards != rewards[0]).any():
            result[here] = (rewards - rewards.mean()) / (deviation + 1e-6)
    return torch.where(inputs.mask, result[inputs.sequence_ids], 0.0)


def rounding_as_signal(inputs: AdvantageInputs, /) -> Tensor:
    """In float32 the mean of equal rewards is off by a rounding, and so is the deviation it is divided by."""
    return _by_group(inputs, divide=True, eps=1e-9)


def trains_prompts(inputs: AdvantageInputs, /) -> Tensor:
    return dr_grpo(AdvantageInputs(**{**_fields(inputs), "mask": torch.ones_like(inputs.mask)}))


def float32_only(inputs: AdvantageInputs, /) -> Tensor:
    return grpo(inputs).float()


def groups_by_position(inputs: AdvantageInputs, /) -> Tensor:
    """Takes consecutive trajectories for a group of a fixed size, whatever their ids."""
    blocks = torch.arange(inputs.rewards.shape[0]) // 3
    return grpo(AdvantageInputs(**{**_fields(inputs), "group_ids": blocks}))


def one_baseline_for_all(inputs: AdvantageInputs, /) -> Tensor:
    return dr_grpo(AdvantageInputs(**{**_fields(inputs), "group_ids": torch.zeros_like(inputs.group_ids)}))


def wrong_sign(inputs: AdvantageInputs, /) -> Tensor:
    return -grpo(inputs)


def kl_of_prompt_tokens(inputs: AdvantageInputs, /) -> Tensor:
    """Sums the KL over the whole row, prompt and tool output included."""
    result = dr_grpo(AdvantageInputs(**{**_fields(inputs), "kl": None}))
    if inputs.kl is None:
        return result
    total = torch.zeros_like(inputs.rewards).index_add(0, inputs.sequence_ids, inputs.kl)
    return torch.where(inputs.mask, result - total[inputs.sequence_ids], 0.0)


def changes_its_input(inputs: AdvantageInputs, /) -> Tensor:
    result = grpo(inputs)
    inputs.rewards.mul_(0.5)
    return result


def _fields(inputs: AdvantageInputs) -> dict[str, Tensor | None]:
    names = ("rewards", "group_ids", "sequence_ids", "mask", "kl", "values")
    return {name: getattr(inputs, name) for name in names}


class Faulty(AdvantageConformance):
    provides = frozenset({"needs-group"})

    def make(self):
        return type(self).fault


class TestDividesByZeroDeviation(Faulty):
    fault = staticmethod(divides_by_zero_deviation)
    caught_by = {
        "test_a_group_of_one_is_finite": "a group of one",
        "test_equal_rewards_stay_finite": "all-equal rewards",
        "test_one_trained_token_in_all_is_finite": "gave NaN or infinity",
    }


class TestDividesByTheDeviationOfOne(Faulty):
    fault = staticmethod(divides_by_the_deviation_of_one)
    caught_by = {
        "test_a_group_of_one_is_finite": "a group of one",
        "test_one_trained_token_in_all_is_finite": "gave NaN or infinity",
    }


class TestRoundingAsSignal(Faulty):
    fault = staticmethod(rounding_as_signal)
    caught_by = {
        "test_equal_rewards_stay_finite": "expected exactly 0",
    }


class TestTrainsPrompts(Faulty):
    fault = staticmethod(trains_prompts)
    caught_by = {
        "test_untrained_tokens_have_no_advantage": "0 outside the mask",
        "test_what_untrained_tokens_hold_does_not_matter": "KL or values",
    }


class TestFloat32Only(Faulty):
    fault = staticmethod(float32_only)
    caught_by = {
        "test_one_finite_value_per_token_in_the_dtype_of_the_rewards": "torch.float32",
    }


class TestGroupsByPosition(Faulty):
    fault = staticmethod(groups_by_position)
    caught_by = {
        "test_groups_of_different_sizes_have_a_baseline_of_their_own": "group of rewards 1, 0",
        "test_the_order_of_sequences_does_not_matter": "reordering",
    }


class TestOneBaselineForAll(Faulty):
    fault = staticmethod(one_baseline_for_all)
    caught_by = {
        "test_groups_of_different_sizes_have_a_baseline_of_their_own": "group of rewards 1, 0",
    }


class TestWrongSign(Faulty):
    fault = staticmethod(wrong_sign)
    caught_by = {
        "test_a_better_trajectory_has_the_larger_advantage": "rewards 3, 0, 1",
        "test_groups_of_different_sizes_have_a_baseline_of_their_own": "group of rewards 1, 0",
    }


class TestKlOfPromptTokens(Faulty):
    fault = staticmethod(kl_of_prompt_tokens)
    caught_by = {
        "test_what_untrained_tokens_hold_does_not_matter": "KL or values",
    }


class TestChangesItsInput(Faulty):
    fault = staticmethod(changes_its_input)
    caught_by = {
        "test_the_advantage_is_pure": "two calls",
        "test_what_untrained_tokens_hold_does_not_matter": "KL or values",
    }
