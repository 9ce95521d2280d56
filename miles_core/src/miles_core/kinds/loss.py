"""Loss: the policy loss of each token. It averages nothing: the backend applies the weights of the tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """One micro-batch: whole sequences, with N tokens in all."""

    logprobs: Tensor
    """f32[N] log-probs under the policy that is trained, with gradient; 0 where the mask is False."""
    old_logprobs: Tensor
    """f32[N] log-probs under the old policy: the trainer's before the update, or the engine's if the run-file says
    so."""
    advantages: Tensor
    """f32[N]"""
    mask: Tensor
    """bool[N] True where the token is trained."""
    sequence_ids: Tensor
    """i64[N] the sequence of each token within the micro-batch, ascending from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    per_token: Tensor
    """f32[N], 0 where the mask is False. The loss of a token may depend on its own sequence only."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """f32[N] each, without gradient. The backend reports their means over all trained tokens of the update."""


class Loss(Protocol):
    """``(inputs, **options) -> LossOutput``. Pure, and differentiable in ``inputs.logprobs``."""

    def __call__(self, inputs: LossInputs, /, **options: Any) -> LossOutput: ...
