"""Advantages against float64 loops written from the papers and numbers worked by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.algorithms import advantages
from miles_core.errors import RunError
from miles_core.kinds.advantage import AdvantageInputs

F64 = torch.float64


def inputs(
    rewards: list[float],
    groups: list[int],
    masks: list[list[int]],
    *,
    kl: list[list[float]] | None = None,
    values: list[list[float]] | None = None,
    dtype: torch.dtype = F64,
) -> AdvantageInputs:
    """A batch from one list of tokens per sequence."""

    def flat(rows: list[list[float]] | None) -> torch.Tensor | None:
        return None if rows is None else torch.tensor([x for row in rows for x in row], dtype=dtype)

    return AdvantageInputs(
        rewards=torch.tensor(rewards, dtype=dtype),
        group_ids=torch.tensor(groups),
        sequence_ids=torch.tensor([s for s, row in enumerate(masks) for _ in row]),
        mask=torch.tensor([bool(x) for row in masks for x in row]),
        kl=flat(kl),
        values=flat(values),
    )


def per_sequence(result: torch.Tensor, batch: AdvantageInputs) -> list[float]:
    """The advantage of each sequence, after checking that its trained tokens share it and the others have 0."""
    assert (result[~batch.mask] == 0).all()
    found = []
    for sequence in range(batch.rewards.shape[0]):
        tokens = result[(batch.sequence_ids == sequence) & batch.mask]
        assert (tokens == tokens[0]).all()
        found.append(float(tokens[0]))
    return found


def whitened(tokens: list[float]) -> list[float]:
    mean = sum(tokens) / len(tokens)
    variance = sum((x - mean) ** 2 for x in tokens) / len(tokens)
    return [(x - mean) / math.sqrt(variance + 1e-8) for x in tokens]


ONE = [0, 1]  # a prompt token and a trained one


def test_grpo_divides_by_the_unbiased_deviation_of_each_group() -> None:
    batch = inputs([1.0, 2.0, 6.0, 0.0, 1.0], [7, 7, 7, 2, 2], [ONE] * 5)
    # group 7: mean 3, squares 4 + 1 + 9 = 14 over 2 -> std sqrt(7); group 2: mean 0.5, std sqrt(0.5)
    a, b = math.sqrt(7.0) + 1e-6, math.sqrt(0.5) + 1e-6
    assert per_sequence(advantages.grpo(batch), batch) == pytest.approx([-2 / a, -1 / a, 3 / a, -0.5 / b, 0.5 / b])


def test_grpo_without_std_only_centres() -> None:
    batch = inputs([1.0, 2.0, 6.0], [0, 0, 0], [ONE] * 3)
    assert per_sequence(advantages.grpo(batch, std=False), batch) == pytest.approx([-2, -1, 3])
    assert torch.equal(advantages.grpo(batch, std=False), advantages.dr_grpo(batch))


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    batch = inputs([1.0, 2.0, 6.0], [0, 0, 0], [ONE] * 3)
    assert per_sequence(advantages.rloo(batch), batch) == pytest.approx([1 - 4, 2 - 3.5, 6 - 1.5])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"])
def test_equal_rewards_give_exactly_zero_where_only_the_group_or_batch_is_compared(name: str) -> None:
    # In float32 the mean of three 0.1 is not 0.1; divided by a rounded deviation that noise would be a signal.
    for dtype in (torch.float32, F64):
        batch = inputs([0.1] * 3, [0] * 3, [[0, 1, 1], [1, 1], [1]], dtype=dtype)
        result = getattr(advantages, name)(batch)
        assert result.dtype is dtype
        assert (result == 0).all()


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_a_group_of_one_compares_with_nothing(name: str) -> None:
    batch = inputs([5.0, 0.0, 1.0], [0, 1, 1], [ONE] * 3)
    assert per_sequence(getattr(advantages, name)(batch), batch)[0] == 0


def test_a_group_that_lost_members_divides_by_those_it_has() -> None:
    # Two of four trajectories failed and were taken out: the baseline is the mean of the two left.
    batch = inputs([1.0, 0.0], [3, 3], [ONE] * 2)
    assert per_sequence(advantages.dr_grpo(batch), batch) == pytest.approx([0.5, -0.5])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_kl_in_the_reward_lowers_the_sequence_reward_by_its_sum_over_trained_tokens(name: str) -> None:
    fn = getattr(advantages, name)
    masks = [[0, 1, 1], [0, 1, 1]]
    with_kl = inputs([1.0, 1.0], [0, 0], masks, kl=[[9.0, 0.1, 0.2], [9.0, 0.0, 0.5]])
    shaped = inputs([1.0 - 0.3, 1.0 - 0.5], [0, 0], masks)
    assert torch.allclose(fn(with_kl), fn(shaped), atol=1e-12, rtol=0)


def naive_returns(rewards: list[float], gamma: float) -> list[float]:
    found, carry = [], 0.0
    for reward in reversed(rewards):
        carry = reward + gamma * carry
        found.append(carry)
    return found[::-1]


def test_reinforce_pp_whitens_discounted_returns_with_token_kl() -> None:
    masks = [[0, 1, 0, 1], [1, 1, 1]]
    kl = [[9.0, 0.1, 9.0, 0.2], [0.3, 0.0, -0.1]]
    batch = inputs([1.0, -1.0], [0, 1], masks, kl=kl)
    # The tool token between the two trained ones of the first sequence neither discounts nor carries KL.
    first = naive_returns([-0.1, -0.2 + 1.0], 0.9)
    second = naive_returns([-0.3, 0.0, 0.1 - 1.0], 0.9)
    result = advantages.reinforce_pp(batch, gamma=0.9)
    assert result[batch.mask].tolist() == pytest.approx(whitened(first + second))
    assert (result[~batch.mask] == 0).all()


def test_reinforce_pp_baseline_centres_groups_subtracts_kl_and_whitens() -> None:
    batch = inputs([1.0, 0.0, 4.0], [0, 0, 1], [[1, 1], [1], [0, 1]], kl=[[0.1, 0.2], [0.0], [7.0, -0.3]])
    result = advantages.reinforce_pp_baseline(batch)
    assert result[batch.mask].tolist() == pytest.approx(whitened([0.5 - 0.1, 0.5 - 0.2, -0.5, 0.0 + 0.3]))
    assert (result[~batch.mask] == 0).all()


def naive_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    found, carry, following = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        carry = reward + gamma * following - value + gamma * lam * carry
        following = value
        found.append(carry)
    return found[::-1]


def test_gae_skips_gaps_whatever_their_length() -> None:
    for gap in (0, 1, 5):
        masks = [[1] + [0] * gap + [1]]
        batch = inputs([2.0], [0], masks, values=[[0.0] * (gap + 2)])
        result = advantages.gae(batch, gamma=0.9, lam=0.5, normalize=False)
        assert result.tolist() == pytest.approx([0.9 * 0.5 * 2] + [0.0] * gap + [2.0])


def test_gae_of_a_masked_tail_ends_at_the_last_trained_token() -> None:
    # gamma = lam = 0: A_t = r_t - V_t with r_t = -kl_t and the reward 10 at the last trained token.
    batch = inputs(
        [10.0],
        [0],
        [[1, 1, 1, 0, 0]],
        kl=[[-0.1, -0.2, -0.3, -7.0, -7.0]],
        values=[[0.5, -0.2, 0.3, 0.9, 0.9]],
    )
    result = advantages.gae(batch, gamma=0.0, lam=0.0, normalize=False)
    assert result.tolist() == pytest.approx([-0.4, 0.4, 10.0, 0, 0])


def test_gae_drops_the_reward_of_a_fully_masked_sequence() -> None:
    batch = inputs([3.0, 1.0], [0, 0], [[0, 0], [1, 0]], values=[[0.5, 0.5], [0.25, 9.0]])
    assert advantages.gae(batch, normalize=False).tolist() == pytest.approx([0, 0, 0.75, 0])


def test_gae_without_values_says_what_to_do() -> None:
    with pytest.raises(RunError, match="critic"):
        advantages.gae(inputs([1.0], [0], [ONE]))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_gae_equals_the_recurrence_and_normalises_over_trained_tokens(data: st.DataObject) -> None:
    number = st.floats(-3, 3, allow_nan=False, width=32)
    lengths = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    masks = [data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)) for n in lengths]
    values = [data.draw(st.lists(number, min_size=n, max_size=n)) for n in lengths]
    kl = [data.draw(st.lists(number, min_size=n, max_size=n)) for n in lengths]
    rewards = [data.draw(number) for _ in lengths]
    gamma, lam = data.draw(st.floats(0, 1)), data.draw(st.floats(0, 1))
    batch = inputs(rewards, [0] * len(lengths), masks, kl=kl, values=values)
    expected: list[float] = []
    for reward, mask, row_values, row_kl in zip(rewards, masks, values, kl, strict=True):
        picked = [t for t, trained in enumerate(mask) if trained]
        shaped = [-row_kl[t] for t in picked]
        if shaped:
            shaped[-1] += reward
        expected += naive_gae(shaped, [row_values[t] for t in picked], gamma, lam)
    found = advantages.gae(batch, gamma=gamma, lam=lam, normalize=False)
    assert found[batch.mask].tolist() == pytest.approx(expected, abs=1e-9)
    assert (found[~batch.mask] == 0).all()
    if len(set(expected)) > 1 and max(expected) - min(expected) > 1e-3:
        normal = advantages.gae(batch, gamma=gamma, lam=lam)
        assert normal[batch.mask].tolist() == pytest.approx(whitened(expected), abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 5, width=32)), min_size=1, max_size=12))
def test_group_advantages_equal_naive_loops(rows: list[tuple[int, float]]) -> None:
    groups, rewards = [g for g, _ in rows], [r for _, r in rows]
    batch = inputs(rewards, groups, [[1]] * len(rows))
    expected: dict[str, list[float]] = {"grpo": [], "dr_grpo": [], "rloo": []}
    for group, reward in rows:
        members = [r for g, r in rows if g == group]
        mean, n = sum(members) / len(members), len(members)
        constant = len(set(members)) == 1
        std = math.sqrt(sum((r - mean) ** 2 for r in members) / (n - 1)) if n > 1 else 0.0
        expected["grpo"].append(0.0 if constant else (reward - mean) / (std + 1e-6))
        expected["dr_grpo"].append(0.0 if constant else reward - mean)
        expected["rloo"].append(0.0 if constant else reward - (sum(members) - reward) / (n - 1))
    for name, values in expected.items():
        fn: Callable[[AdvantageInputs], torch.Tensor] = getattr(advantages, name)
        assert fn(batch).tolist() == pytest.approx(values, rel=1e-9, abs=1e-9)
