"""The learning rate of each optimizer step, and which parameters decay: the same for every backend."""

from __future__ import annotations

import math

from torch import Tensor

from miles_core.kinds.backend import OptimizerSettings


def learning_rate(settings: OptimizerSettings, update: int) -> float:
    """Learning rate of the optimizer step that follows `update` finished ones.

    Linear from ``lr / warmup_steps`` to `lr` in the warm-up; then constant, or falling to ``min_lr_ratio * lr`` at
    `total_steps`, which the step after the last one would have: no step is spent at a rate of 0.
    """
    if update < settings.warmup_steps:
        return settings.lr * (update + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    span = max(1, settings.total_steps - settings.warmup_steps)
    progress = min(1.0, (update - settings.warmup_steps) / span)
    shape = 1.0 - progress if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return settings.lr * (settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * shape)


def decays(name: str, parameter: Tensor) -> bool:
    """Weight decay acts on matrices; norms and biases are left alone (also stacked ones, which have two dimensions)."""
    parts = name.split(".")
    return parameter.dim() >= 2 and parts[-1] != "bias" and not any("norm" in part for part in parts[-2:])
