"""Rewards to per-token advantages. Pure functions ``AdvantageInputs -> f[N]``; the batch is that of a whole step.

Shape letters: S sequences, N packed tokens, P trained tokens (mask True).

All statistics are computed in float64 and returned in the dtype of the rewards. A group whose rewards are all equal, or
that has one member, gives exactly 0: a rounded mean must not become a signal once it is divided by a rounded deviation.
When `inputs.kl` is given it lowers the reward: per token where the estimator has token rewards (reinforce-pp, gae),
summed over the sequence where it has one reward a sequence (grpo, dr-grpo, rloo).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miles_core.errors import RunError
from miles_core.kinds.advantage import AdvantageInputs

STD_EPS = 1e-6  # small against the deviation of any reward scale in use
VAR_EPS = 1e-8  # of batch whitening, under the root


def grpo(inputs: AdvantageInputs, /, *, std: bool = True) -> Tensor:
    """Group-normalised reward, the same for every token of a sequence.

    ``A = (r - mean) / (std + 1e-6)`` with the unbiased deviation of the group; without `std`, ``A = r - mean``.

    Args:
        std: Divide by the group's deviation.
    Returns:
        f[N], 0 outside the mask.
    Source: DeepSeekMath, arXiv:2402.03300.
    """
    groups = _Groups.of(_sequence_rewards(inputs), inputs.group_ids)
    advantages = groups.centred()
    if std:
        deviation = groups.std()
        advantages = torch.where(deviation > 0, advantages / (deviation + STD_EPS), advantages)
    return _spread(advantages, inputs)


def dr_grpo(inputs: AdvantageInputs, /) -> Tensor:
    """``A = r - mean``: no division by the deviation, which would weigh easy and hard prompts up. Returns f[N].

    Source: Dr. GRPO, arXiv:2503.20783; pair it with the `fixed-length` reduction, its other half.
    """
    return _spread(_Groups.of(_sequence_rewards(inputs), inputs.group_ids).centred(), inputs)


def rloo(inputs: AdvantageInputs, /) -> Tensor:
    """``A = r - mean of the group's other rewards``; 0 for a group of one, which has no others. Returns f[N].

    Source: Back to Basics, arXiv:2402.14740.
    """
    groups = _Groups.of(_sequence_rewards(inputs), inputs.group_ids)
    others = (groups.size - 1).clamp(min=1)
    # r - (sum - r)/(n - 1) = (r - mean) * n/(n - 1), which keeps equal rewards at exactly 0.
    return _spread(groups.centred() * groups.size / others, inputs)


def reinforce_pp(inputs: AdvantageInputs, /, *, gamma: float = 1.0) -> Tensor:
    """Discounted return of ``-kl_t`` plus the reward at the last trained token, whitened over the batch's trained
    tokens.

    Returns run over the trained tokens of a sequence; tool output between two turns does not discount.

    Args:
        gamma: Discount per trained token.
    Returns:
        f[N], 0 outside the mask.
    Source: REINFORCE++, arXiv:2501.03262.
    """
    rows = _TrainedRows.of(inputs)
    rewards = rows.token_rewards(inputs, inputs.rewards.double())
    returns = rows.scan(rewards, decay=gamma)
    return _whiten(rows.unpack(returns, inputs), inputs.mask).to(inputs.rewards.dtype)


def reinforce_pp_baseline(inputs: AdvantageInputs, /) -> Tensor:
    """``(r - group mean) - kl_t``, whitened over the batch's trained tokens. Returns f[N].

    Source: REINFORCE++, arXiv:2501.03262, the variant with a group baseline.
    """
    centred = _Groups.of(inputs.rewards.double(), inputs.group_ids).centred()
    tokens = centred[inputs.sequence_ids]
    if inputs.kl is not None:
        tokens = tokens - inputs.kl.double()
    return _whiten(tokens, inputs.mask).to(inputs.rewards.dtype)


def gae(inputs: AdvantageInputs, /, *, gamma: float = 1.0, lam: float = 0.95, normalize: bool = True) -> Tensor:
    """Generalised advantage estimation on the subsequence of trained tokens.

    ``delta_t = r_t + gamma V_next - V_t``, ``A_t = delta_t + gamma lam A_next``; the value after the last trained
    token is 0, also for truncated sequences. Untrained tokens in between neither discount nor bootstrap.

    Args:
        gamma: Discount per trained token.
        lam: Weight of longer returns.
        normalize: Whiten over the batch's trained tokens.
    Returns:
        f[N], 0 outside the mask.
    Raises:
        RunError: the batch carries no critic's values.
    Source: arXiv:1506.02438, eq. 16.
    """
    if inputs.values is None:
        raise RunError(
            "advantage `gae` has no values",
            expected="a critic's value of every token",
            found="a batch without `values`",
            do="pick a backend that trains a critic, or advantage: reinforce-pp, which needs none",
        )
    rows = _TrainedRows.of(inputs)
    values = rows.pack(inputs.values.double())
    following = torch.cat([values[:, 1:], values.new_zeros(values.shape[0], 1)], dim=1)
    deltas = rows.token_rewards(inputs, inputs.rewards.double()) + gamma * following - values
    advantages = rows.unpack(rows.scan(deltas, decay=gamma * lam), inputs)
    return (_whiten(advantages, inputs.mask) if normalize else advantages).to(inputs.rewards.dtype)


# --- groups ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Groups:
    """Rewards [S] and, for each, the statistics of its group as it is: members that were filtered out do not count."""

    rewards: Tensor
    index: Tensor
    """i64[S] dense group number"""
    size: Tensor
    """f64[S]"""
    constant: Tensor
    """bool[S] all rewards of the group are equal"""

    @classmethod
    def of(cls, rewards: Tensor, group_ids: Tensor) -> _Groups:
        _, index = torch.unique(group_ids, return_inverse=True)
        count = int(index.max()) + 1 if index.numel() else 0
        size = rewards.new_zeros(count).index_add_(0, index, torch.ones_like(rewards))
        empty = rewards.new_zeros(count)
        highest = empty.scatter_reduce(0, index, rewards, "amax", include_self=False)
        lowest = empty.scatter_reduce(0, index, rewards, "amin", include_self=False)
        return cls(rewards, index, size[index], (highest == lowest)[index])

    def mean_of(self, values: Tensor) -> Tensor:
        total = values.new_zeros(int(self.index.max()) + 1 if self.index.numel() else 0)
        return total.index_add_(0, self.index, values)[self.index] / self.size

    def centred(self) -> Tensor:
        return torch.where(self.constant, 0.0, self.rewards - self.mean_of(self.rewards))

    def std(self) -> Tensor:
        """Unbiased; 0 for constant groups and groups of one."""
        variance = self.mean_of(self.centred().square()) * self.size / (self.size - 1).clamp(min=1)
        return torch.where(self.constant, 0.0, variance.sqrt())


def _sequence_rewards(inputs: AdvantageInputs) -> Tensor:
    """f64[S] reward less the sequence's KL."""
    rewards = inputs.rewards.double()
    if inputs.kl is None:
        return rewards
    kl = torch.where(inputs.mask, inputs.kl.double(), 0.0)
    return rewards - rewards.new_zeros(rewards.shape).index_add_(0, inputs.sequence_ids, kl)


def _spread(advantages: Tensor, inputs: AdvantageInputs) -> Tensor:
    """f[S] -> f[N], 0 outside the mask."""
    return torch.where(inputs.mask, advantages[inputs.sequence_ids], 0.0).to(inputs.rewards.dtype)


def _whiten(tokens: Tensor, mask: Tensor) -> Tensor:
    """f64[N] with mean 0 and deviation 1 over the mask; 0 outside it, and everywhere when all trained tokens are
    equal.
    """
    trained = tokens[mask]
    if not trained.numel() or bool(trained.max() == trained.min()):
        return torch.zeros_like(tokens)
    centred = tokens - trained.mean()
    return torch.where(mask, centred / (centred[mask].square().mean() + VAR_EPS).sqrt(), 0.0)


# --- trained tokens as rows -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _TrainedRows:
    """The trained tokens of each sequence, moved together: [S, longest], zeros behind the end.

    Recurrences run over the columns, so that gaps in the mask vanish and the loop is as long as the longest sequence.
    """

    tokens: Tensor
    """i64[P] position of each trained token in the packed arrays"""
    rows: Tensor
    """i64[P]"""
    columns: Tensor
    """i64[P]"""
    lengths: Tensor
    """i64[S]"""

    @classmethod
    def of(cls, inputs: AdvantageInputs) -> _TrainedRows:
        tokens = inputs.mask.nonzero().squeeze(1)
        rows = inputs.sequence_ids[tokens]
        lengths = torch.bincount(rows, minlength=inputs.rewards.shape[0])
        starts = torch.cumsum(lengths, 0) - lengths
        columns = torch.arange(tokens.shape[0], device=tokens.device) - starts[rows]
        return cls(tokens, rows, columns, lengths)

    def pack(self, values: Tensor) -> Tensor:
        longest = int(self.lengths.max()) if self.lengths.numel() else 0
        packed = values.new_zeros(self.lengths.shape[0], longest)
        packed[self.rows, self.columns] = values[self.tokens]
        return packed

    def unpack(self, packed: Tensor, inputs: AdvantageInputs) -> Tensor:
        tokens = packed.new_zeros(inputs.mask.shape)
        tokens[self.tokens] = packed[self.rows, self.columns]
        return tokens

    def token_rewards(self, inputs: AdvantageInputs, rewards: Tensor) -> Tensor:
        """``-kl`` at each trained token plus the sequence's reward at its last one; a sequence without any loses it."""
        kl = torch.zeros_like(inputs.mask, dtype=torch.float64) if inputs.kl is None else inputs.kl.double()
        packed = -self.pack(kl)
        alive = self.lengths > 0
        packed[alive, self.lengths[alive] - 1] += rewards[alive]
        return packed

    def scan(self, packed: Tensor, *, decay: float) -> Tensor:
        """``y_t = x_t + decay * y_{t+1}`` along each row."""
        result = torch.empty_like(packed)
        carry = packed.new_zeros(packed.shape[0])
        for column in range(packed.shape[1] - 1, -1, -1):
            carry = packed[:, column] + decay * carry
            result[:, column] = carry
        return result
