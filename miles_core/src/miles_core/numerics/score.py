"""Log-probs of tokens as both sides define them under true-on-policy.

The temperature goes through float32, as a batch stores it, and multiplies as its reciprocal: the trainer has no other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from miles_core.numerics.ops import logsumexp


def inverse_temperatures(temperatures: Sequence[float]) -> Tensor:
    """f64[M] 1 / T of each row; T = 0 stands for the log-prob of temperature 1."""
    stored = np.array([temperature or 1.0 for temperature in temperatures], dtype=np.float32)
    return torch.from_numpy(1.0 / stored.astype(np.float64))


def logprobs(logits: Tensor, targets: Tensor, inverse_temperature: Tensor) -> Tensor:
    """f32[M] log-prob of each row's target.

    Args:
        logits: f[M, V]
        targets: i64[M]
        inverse_temperature: f[M]
    """
    scaled = logits.float() * inverse_temperature.float()[:, None]
    return scaled.gather(-1, targets[:, None])[:, 0] - logsumexp(scaled)
