"""Corrections: the log-ratio between trainer and rollout to per-token weights. Pure; evaluated on a whole batch.

Shape letters: N packed tokens, S sequences. ``m = pre-update trainer policy / rollout policy`` of a token. A correction
bounds how far a remaining mismatch moves the gradient; it makes no two policies equal. The weight multiplies the loss
after its own clipping, is 1 outside the mask and carries no gradient. Every correction reports the same metrics, f[N]
each:

    ratio              m, before any bound
    weight             after the bound
    clipped_fraction   1 where the bound changed the weight
    abs_deviation      |m - 1|
    k1, k2, k3         estimates of KL(rollout || trainer)
    ess                effective sample size of the batch's weights as a fraction of its tokens; same at each token
    perplexity_ratio   trainer's perplexity over rollout's on the batch's tokens; same at each token
    ratio_bin/...      1 where m lies in that bin of the histogram
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from miles_core.algorithms.kl import MAX_LOG_RATIO
from miles_core.contracts.logprobs import histogram

Result = tuple[Tensor, dict[str, Tensor]]


def tis(log_ratio: Tensor, mask: Tensor, sequence_ids: Tensor, /, *, low: float = 0.0, high: float = 2.0) -> Result:
    """Truncated importance sampling: ``clamp(m, low, high)``; an outlier stays in the gradient with bounded leverage.

    Args:
        log_ratio: f[N]  mask: bool[N]  sequence_ids: i64[N]
        low, high: Bounds of the weight.
    Returns:
        (f[N] weight, metrics)
    """
    return importance(log_ratio, mask, sequence_ids, level="token", action="truncate", low=low, high=high)


def clip_or_pop(
    log_ratio: Tensor, mask: Tensor, sequence_ids: Tensor, /, *, low: float = 0.0, high: float = 2.0
) -> Result:
    """``m`` where ``low <= m <= high``, else 0: an outlier leaves the gradient. Arguments and result as for `tis`."""
    return importance(log_ratio, mask, sequence_ids, level="token", action="mask", low=low, high=high)


def metrics_only(log_ratio: Tensor, mask: Tensor, sequence_ids: Tensor, /) -> Result:
    """Weight 1 everywhere: measures the mismatch and leaves the gradient alone."""
    weight = torch.ones_like(log_ratio)
    return weight, _metrics(log_ratio, mask, weight, changed=torch.zeros_like(mask))


def importance(
    log_ratio: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    /,
    *,
    level: Literal["token", "sequence", "geometric"] = "token",
    action: Literal["truncate", "mask", "veto"] = "truncate",
    low: float = 0.0,
    high: float = 2.0,
) -> Result:
    """The general form. `level` says whose ratio is judged, `action` what happens outside ``[low, high]``.

    Args:
        level: `token` m itself; `sequence` the product of m over the sequence's trained tokens; `geometric` its
            length-normalised form, the geometric mean.
        action: `truncate` weighs by the ratio, brought into the bounds; `mask` weighs by the ratio, 0 outside them;
            `veto` weighs 1 and drops every sequence that has a ratio outside them.
        low, high: Bounds, inclusive.
    Returns:
        (f[N] weight, metrics)
    """
    log_ratio = log_ratio.detach()
    judged = _at_level(log_ratio, mask, sequence_ids, level).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    outside = mask & ((judged < low) | (judged > high))
    if action == "truncate":
        weight = judged.clamp(low, high)
    elif action == "mask":
        weight = torch.where(outside, 0.0, judged)
    else:
        outside = mask & (_sum_by_sequence(outside.to(log_ratio.dtype), sequence_ids) > 0)
        # A NaN ratio is inside no bounds and outside none: it must reach the loss, not be vetoed away.
        weight = torch.where(outside, 0.0, torch.where(judged.isnan(), judged, 1.0))
    weight = torch.where(mask, weight, 1.0)
    return weight, _metrics(log_ratio, mask, weight, changed=outside)


def _at_level(log_ratio: Tensor, mask: Tensor, sequence_ids: Tensor, level: str) -> Tensor:
    """f[N] log-ratio of the unit each token belongs to; 0 outside the mask."""
    log_ratio = torch.where(mask, log_ratio, 0.0)
    if level == "token":
        return log_ratio
    total = _sum_by_sequence(log_ratio, sequence_ids)
    if level == "geometric":
        total = total / _sum_by_sequence(mask.to(log_ratio.dtype), sequence_ids).clamp(min=1)
    return torch.where(mask, total, 0.0)


def _sum_by_sequence(values: Tensor, sequence_ids: Tensor) -> Tensor:
    """f[N] sum over the token's own sequence."""
    sequences = int(sequence_ids.max()) + 1 if sequence_ids.numel() else 0
    return values.new_zeros(sequences).index_add(0, sequence_ids, values)[sequence_ids]


def _metrics(log_ratio: Tensor, mask: Tensor, weight: Tensor, *, changed: Tensor) -> dict[str, Tensor]:
    d = torch.where(mask, log_ratio.detach(), 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    tokens = mask.sum().clamp(min=1).to(d.dtype)
    kept = torch.where(mask, weight, 0.0)
    squares = kept.square().sum()
    ess = torch.where(squares > 0, kept.sum().square() / (tokens * squares.clamp(min=torch.finfo(d.dtype).tiny)), 0.0)
    per_token = {
        "ratio": d.exp(),
        "weight": weight,
        "clipped_fraction": changed.to(d.dtype),
        "abs_deviation": torch.expm1(d).abs(),
        "k1": -d,
        "k2": 0.5 * d.square(),
        "k3": torch.expm1(d) - d,
        "ess": ess.expand_as(d),
        "perplexity_ratio": (-d.sum() / tokens).exp().expand_as(d),
    }
    per_token |= {f"ratio_bin/{name}": part.to(d.dtype) for name, part in histogram(d.exp()).items()}
    return {name: torch.where(mask, value, 0.0) for name, value in per_token.items()}
