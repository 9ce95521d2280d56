"""Per-token policy losses. Pure functions ``LossInputs -> LossOutput``; reduction and corrections are the caller's.

Shape letters: N packed tokens of a micro-batch, S its sequences. Log-ratios are clamped to +-20 nats so that a token of
vanishing probability gives a finite loss; NaN is passed on, since the step's non-finite policy must see it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles_core.algorithms.kl import MAX_LOG_RATIO
from miles_core.kinds.loss import LossInputs, LossOutput


def ppo_clip(
    inputs: LossInputs, /, *, low: float = 0.2, high: float | None = None, dual_clip: float | None = None
) -> LossOutput:
    """``max(-rho A, -clip(rho, 1 - low, 1 + high) A)`` with ``rho = policy / old policy`` of the token.

    Args:
        low, high: Clip distances below and above 1; `high` defaults to `low`.
        dual_clip: Bound c > 1: where A < 0 the loss is at most ``-c A`` (arXiv:1912.09729).
    Returns:
        Loss f[N] and the metrics clip_fraction_low, clip_fraction_high, clip_fraction_dual, approx_kl, ratio.
    Source: PPO, arXiv:1707.06347, eq. 7; asymmetric clip: DAPO, arXiv:2503.14476.
    """
    log_ratio = _log_ratio(inputs)
    return _clipped(
        log_ratio.exp(), log_ratio, inputs, low=low, high=low if high is None else high, dual_clip=dual_clip
    )


def gspo(inputs: LossInputs, /, *, low: float = 3e-4, high: float = 4e-4) -> LossOutput:
    """The clipped loss with one ratio per sequence: ``s = exp(mean over its trained tokens of log policy - log old)``.

    The gradient flows through `s`, so each trained token receives ``s A / n`` of its sequence's: with the reduction
    `sequence-mean-token-mean` this is eq. 5 of the paper.

    Args:
        low, high: Clip distances of the sequence ratio; the paper's are four orders below those of a token ratio.
    Returns:
        Loss f[N] (equal within a sequence of one advantage) and the metrics of `ppo_clip` but the dual one.
    Source: GSPO, arXiv:2507.18071, eq. 5-7.
    """
    log_ratio = _log_ratio(inputs)
    sequences = int(inputs.sequence_ids.max()) + 1 if inputs.sequence_ids.numel() else 0
    total = log_ratio.new_zeros(sequences).index_add(0, inputs.sequence_ids, log_ratio)
    trained = log_ratio.new_zeros(sequences).index_add(0, inputs.sequence_ids, inputs.mask.to(log_ratio.dtype))
    mean = (total / trained.clamp(min=1))[inputs.sequence_ids]
    return _clipped(mean.exp(), log_ratio, inputs, low=low, high=high, dual_clip=None)


def cispo(inputs: LossInputs, /, *, low: float = 1.0, high: float = 4.0) -> LossOutput:
    """``-clip(rho, 1 - low, 1 + high) A log policy`` with no gradient through the clipped ratio.

    Every token keeps its gradient; a clipped one merely has a bounded weight.

    Args:
        low: Clip distance below 1; 1.0 leaves small ratios as they are.
        high: Clip distance above 1. 4.0 caps the weight at 5.
    Returns:
        Loss f[N] and the metrics clip_fraction_low, clip_fraction_high, approx_kl, ratio.
    Source: MiniMax-M1, arXiv:2506.13585.
    """
    log_ratio = _log_ratio(inputs).detach()
    ratio = log_ratio.exp()
    weight = ratio.clamp(1.0 - low, 1.0 + high)
    logprobs = torch.where(inputs.mask, inputs.logprobs, 0.0)
    metrics = {
        "clip_fraction_low": _flag(ratio < 1.0 - low, inputs),
        "clip_fraction_high": _flag(ratio > 1.0 + high, inputs),
        **_ratio_metrics(ratio, log_ratio, inputs),
    }
    return LossOutput(per_token=torch.where(inputs.mask, -weight * inputs.advantages * logprobs, 0.0), metrics=metrics)


def _log_ratio(inputs: LossInputs) -> Tensor:
    """f[N] log policy - log old, clamped; 0 outside the mask, where either may hold anything."""
    difference = torch.where(inputs.mask, inputs.logprobs - inputs.old_logprobs, 0.0)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _clipped(
    ratio: Tensor, log_ratio: Tensor, inputs: LossInputs, *, low: float, high: float, dual_clip: float | None
) -> LossOutput:
    advantages = torch.where(inputs.mask, inputs.advantages, 0.0)
    plain = -ratio * advantages
    clipped = -ratio.clamp(1.0 - low, 1.0 + high) * advantages
    loss = torch.maximum(plain, clipped)
    active = clipped > plain
    metrics = {
        "clip_fraction_low": _flag(active & (ratio < 1.0 - low), inputs),
        "clip_fraction_high": _flag(active & (ratio > 1.0 + high), inputs),
        **_ratio_metrics(ratio, log_ratio, inputs),
    }
    if dual_clip is not None:
        bound = -dual_clip * advantages
        over = (advantages < 0) & (loss > bound)
        loss = torch.where(over, bound, loss)
        metrics["clip_fraction_dual"] = _flag(over, inputs)
    return LossOutput(per_token=torch.where(inputs.mask, loss, 0.0), metrics=metrics)


def _ratio_metrics(ratio: Tensor, log_ratio: Tensor, inputs: LossInputs) -> dict[str, Tensor]:
    """The ratio that is clipped, and k3 of KL(old || policy) at each token: tokens were sampled from the old policy."""
    log_ratio = log_ratio.detach()
    approx_kl = torch.expm1(log_ratio) - log_ratio
    return {
        "ratio": torch.where(inputs.mask, ratio.detach(), 0.0),
        "approx_kl": torch.where(inputs.mask, approx_kl, 0.0),
    }


def _flag(condition: Tensor, inputs: LossInputs) -> Tensor:
    return (condition & inputs.mask).to(inputs.logprobs.dtype)
