"""Loss: the per-token policy loss. Reduction is not its business: it returns f[N], the backend applies the weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """One micro-batch of whole sequences. N packed tokens."""

    logprobs: Tensor
    """f32[N] of the policy being optimised; carries the gradient. 0 outside the mask."""
    old_logprobs: Tensor
    """f32[N] of the old policy (trainer pre-update, or rollout when the run says so)."""
    advantages: Tensor
    """f32[N]"""
    mask: Tensor
    """bool[N]"""
    sequence_ids: Tensor
    """i64[N] sequence of each token within the micro-batch, ascending from 0; sequences are never split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    per_token: Tensor
    """f32[N], 0 outside the mask; its value at a token depends on the token's own sequence alone."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Per-token f32[N] without gradient; the backend reports their mean over all trained tokens of the update."""


class Loss(Protocol):
    """``(inputs, **options) -> LossOutput``: pure and differentiable in ``inputs.logprobs``."""

    def __call__(self, inputs: LossInputs, /, **options: Any) -> LossOutput: ...
