"""Advantage: turns the rewards of a batch into one number for each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """The whole batch of one step: S trajectories with N tokens in all. Floats are float32 or float64."""

    rewards: Tensor
    """f[S] one number per trajectory. Failed trajectories are not among them."""
    group_ids: Tensor
    """i64[S] equal for trajectories of one prompt; groups may differ in size."""
    sequence_ids: Tensor
    """i64[N] the trajectory of each token, ascending from 0."""
    mask: Tensor
    """bool[N] True where the token is trained."""
    kl: Tensor | None = None
    """f[N] the KL penalty of each token, coefficient included, if the run has KL in the reward."""
    values: Tensor | None = None
    """f[N] a critic's values."""


class Advantage(Protocol):
    """``(inputs, **options) -> f[N]``, in the dtype of the rewards.

    Pure. 0 where the mask is False; finite for all finite rewards, also where they are all equal.
    """

    def __call__(self, inputs: AdvantageInputs, /, **options: Any) -> Tensor: ...
