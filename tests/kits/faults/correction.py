"""Wrong corrections, each with one fault. The kit must catch every one."""

from __future__ import annotations

import torch
from torch import Tensor

from miles_core.algorithms.corrections import Result, importance, tis


def zero_outside_the_mask(log_ratio: Tensor, mask: Tensor, sequence_ids: Tensor, /) -> Result:
    weight, metrics = tis(log_ratio, mask, sequence_ids)
    return torch.where(mask, weight, 0.0), metrics


def unbounded(log_ratio: Tensor, mask: Tensor, sequence_ids: Tensor, /) -> Result:
    return torch.where(mask, log_ratio.detach().exp(), 1.0), {}


def log_ratio_as_weight(log_ratio: Tensor, mask: Tensor, sequence_ids: Tensor, /) -> Result:
    """Forgets the exponential."""
    return torch.where(mask, log_ratio.detach().clamp(-2, 2), 1.0), {}


def carries_gradient(log_ratio: Tensor, mask: Tensor, sequence_ids: Tensor, /) -> Result:
    return torch.where(mask, log_ratio.clamp(-20, 0.5).exp(), 1.0), {}


def product_over_prompts(log_ratio: Tensor, mask: Tensor, sequence_ids: Tensor, /) -> Result:
    """A sequence product that takes in the prompt's tokens."""
    weight, _ = importance(log_ratio, torch.ones_like(mask), sequence_ids, level="sequence")
    return torch.where(mask, weight, 1.0), {}


def sequences_by_position(log_ratio: Tensor, mask: Tensor, sequence_ids: Tensor, /) -> Result:
    """Takes equal slices of the pack for its sequences."""
    slices = torch.arange(mask.shape[0]) // 4
    return importance(log_ratio, mask, slices, level="geometric")


def metric_of_all_tokens(log_ratio: Tensor, mask: Tensor, sequence_ids: Tensor, /) -> Result:
    weight, _ = tis(log_ratio, mask, sequence_ids)
    return weight, {"mean_log_ratio": log_ratio.detach().mean().expand_as(log_ratio).clone()}


def scalar_metric(log_ratio: Tensor, mask: Tensor, sequence_ids: Tensor, /) -> Result:
    weight, _ = tis(log_ratio, mask, sequence_ids)
    return weight, {"mean": torch.where(mask, log_ratio.detach(), 0.0).sum() / mask.sum()}
