"""Conformance kit for advantages: finite, 0 where nothing is trained, larger for better trajectories, and independent
of the order of trajectories and of the numbers of groups.

class TestMine(AdvantageConformance):
    provides = frozenset({"needs-group"})       # as declared in the capability
    def make(self) -> Advantage: return my_advantage
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from miles_core.kinds.advantage import Advantage, AdvantageInputs

LENGTHS = (3, 5, 2, 4, 6, 1, 4)


def example(rewards: Sequence[float], groups: Sequence[int], *, dtype: torch.dtype = torch.float64) -> AdvantageInputs:
    """One sequence per reward, with a prompt, a gap in the mask of longer ones, a small KL and critic's values."""
    lengths = LENGTHS[: len(rewards)]
    generator = torch.Generator().manual_seed(5)
    total = sum(lengths)
    mask = torch.tensor([(t > 0 and t != 2) or n == 1 for n in lengths for t in range(n)])
    return AdvantageInputs(
        rewards=torch.tensor(rewards, dtype=dtype),
        group_ids=torch.tensor(groups),
        sequence_ids=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        mask=mask,
        kl=None,
        values=torch.rand(total, generator=generator, dtype=torch.float64).to(dtype) * 0.1,
    )


REWARDS = (0.5, 1.0, -1.0, 2.0, 0.0, 3.0, 0.25)
GROUPS = (0, 0, 0, 1, 1, 2, 2)


class AdvantageConformance:
    """Subclass it and say how to make the advantage."""

    options: ClassVar[Mapping[str, Any]] = {}
    """Keyword arguments the advantage is called with."""
    provides: ClassVar[frozenset[str]] = frozenset()
    """Tags of its capability: `needs-group` adds the group tests, `needs-values` hands it critic's values."""

    def make(self) -> Advantage:
        raise NotImplementedError

    def call(self, inputs: AdvantageInputs) -> Tensor:
        if "needs-values" not in self.provides:
            inputs = replace(inputs, values=None)
        return self.make()(inputs, **self.options)

    def require(self, tag: str) -> None:
        if tag not in self.provides:
            pytest.skip(f"does not declare `{tag}`")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_one_finite_value_per_token_in_the_dtype_of_the_rewards(self, dtype: torch.dtype) -> None:
        inputs = example(REWARDS, GROUPS, dtype=dtype)
        result = self.call(inputs)
        assert result.shape == inputs.mask.shape, (
            f"shape {tuple(result.shape)}, expected [N] = {tuple(inputs.mask.shape)}"
        )
        assert result.dtype is dtype, f"rewards are {dtype}, the advantages {result.dtype}"
        assert result.isfinite().all(), "an advantage is NaN or infinite"

    def test_untrained_tokens_have_no_advantage(self) -> None:
        inputs = example(REWARDS, GROUPS)
        assert (self.call(inputs)[~inputs.mask] == 0).all(), "advantages must be 0 outside the mask"

    def test_what_untrained_tokens_hold_does_not_matter(self) -> None:
        inputs = replace(example(REWARDS, GROUPS), kl=torch.full((sum(LENGTHS),), 0.01, dtype=torch.float64))
        assert inputs.kl is not None
        assert inputs.values is not None
        noisy = replace(
            inputs,
            kl=torch.where(inputs.mask, inputs.kl, 50.0),
            values=torch.where(inputs.mask, inputs.values, -50.0),
        )
        assert torch.allclose(self.call(inputs), self.call(noisy), atol=1e-9), (
            "KL or values of untrained tokens changed the advantages"
        )

    @pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -1e6])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_equal_rewards_stay_finite(self, reward: float, dtype: torch.dtype) -> None:
        result = self.call(example([reward] * 7, [0] * 7, dtype=dtype))
        assert result.isfinite().all(), f"all-equal rewards {reward} gave NaN or infinity"
        if "needs-group" in self.provides:
            # 0.1 in float32: a mean that is rounded, divided by a deviation that is rounding too, is a signal of
            # order 1.
            assert (result == 0).all(), f"all-equal rewards {reward} gave {result.abs().max()}, expected exactly 0"

    def test_a_group_of_one_is_finite(self) -> None:
        result = self.call(example([1.0, 0.0, 5.0], [0, 0, 1]))
        assert result.isfinite().all(), "a group of one gave NaN or infinity"

    def test_one_trained_token_in_all_is_finite(self) -> None:
        result = self.call(replace(example([2.0], [0]), mask=torch.tensor([False, True, False])))
        assert result.isfinite().all(), "one trained token in all gave NaN or infinity"

    def test_a_sequence_without_trained_tokens_is_finite(self) -> None:
        inputs = example(REWARDS, GROUPS)
        mask = inputs.mask & (inputs.sequence_ids != 1)
        result = self.call(replace(inputs, mask=mask))
        assert result.isfinite().all(), "a sequence without trained tokens gave NaN or infinity"

    def test_the_order_of_sequences_does_not_matter(self) -> None:
        inputs = example(REWARDS, GROUPS)
        order = [4, 0, 6, 2, 5, 1, 3]
        tokens = torch.cat([torch.nonzero(inputs.sequence_ids == s).squeeze(1) for s in order])
        assert inputs.values is not None
        lengths = torch.tensor([LENGTHS[s] for s in order])
        permuted = AdvantageInputs(
            rewards=inputs.rewards[order],
            group_ids=inputs.group_ids[order],
            sequence_ids=torch.repeat_interleave(torch.arange(len(order)), lengths),
            mask=inputs.mask[tokens],
            values=inputs.values[tokens],
        )
        assert torch.allclose(self.call(permuted), self.call(inputs)[tokens], atol=1e-9), (
            "reordering the sequences changed their advantages"
        )

    def test_group_ids_are_labels_only(self) -> None:
        inputs = example(REWARDS, GROUPS)
        relabelled = replace(inputs, group_ids=torch.tensor([900, -4, 17])[inputs.group_ids])
        assert torch.allclose(self.call(relabelled), self.call(inputs), atol=1e-9), (
            "the numbers of the groups changed the advantages"
        )

    def test_a_better_trajectory_has_the_larger_advantage(self) -> None:
        inputs = example([3.0, 0.0, 1.0], [0, 0, 0])
        inputs = replace(inputs, values=torch.zeros_like(inputs.mask, dtype=torch.float64))
        result = self.call(inputs)
        means = [float(result[inputs.mask & (inputs.sequence_ids == s)].mean()) for s in range(3)]
        assert means[0] > means[2] > means[1], f"rewards 3, 0, 1 gave mean advantages {means}"

    def test_groups_of_different_sizes_have_a_baseline_of_their_own(self) -> None:
        self.require("needs-group")
        inputs = example([1.0, 0.0, 11.0, 10.0, 10.0], [0, 0, 1, 1, 1])
        result = self.call(inputs)
        means = [float(result[inputs.mask & (inputs.sequence_ids == s)].mean()) for s in range(5)]
        assert means[0] > 0 > means[1], f"group of rewards 1, 0 gave {means[:2]}"
        assert means[2] > 0 > means[3], f"group of rewards 11, 10, 10 gave {means[2:]}"

    def test_the_advantage_is_pure(self) -> None:
        inputs = example(REWARDS, GROUPS)
        rewards, mask = inputs.rewards.clone(), inputs.mask.clone()
        assert torch.equal(self.call(inputs), self.call(inputs)), "two calls with the same inputs differ"
        assert torch.equal(inputs.rewards, rewards), "the rewards were changed in place"
        assert torch.equal(inputs.mask, mask), "the mask was changed in place"
