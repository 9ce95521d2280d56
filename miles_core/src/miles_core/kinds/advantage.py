"""Advantage: rewards to per-token advantages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """The whole batch of one step. S sequences, N packed tokens; float32 or float64, results keep the dtype."""

    rewards: Tensor
    """f[S] one scalar per trajectory; failures were taken out before, so every row counts."""
    group_ids: Tensor
    """i64[S] trajectories of one prompt share an id; groups may differ in size."""
    sequence_ids: Tensor
    """i64[N] sequence of each token, ascending."""
    mask: Tensor
    """bool[N] trained tokens."""
    kl: Tensor | None = None
    """f[N] per-token KL estimate to the reference policy, already times its coefficient, when KL is in the reward."""
    values: Tensor | None = None
    """f[N] critic's values."""


class Advantage(Protocol):
    """``(inputs, **options) -> f[N]``: pure; 0 outside the mask; finite for every finite reward, also for all-equal
    ones."""

    def __call__(self, inputs: AdvantageInputs, /, **options: Any) -> Tensor: ...
