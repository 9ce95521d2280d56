"""Contract 3: trainer and rollout give each sampled token the same log-prob under the same weights.

Per trained token, ``d = log old (trainer, before the update) - log rollout`` and the ratio ``m = e^d``. Perfect is d
= 0 everywhere. Numerics, staleness, a wrong temperature, a shifted mask or a broken template all show here first.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from miles_core.contracts.report import MAX_OFFENDERS, Report, Verdict
from miles_core.types import TrainBatch

MAX_MEAN_ABS_DIFF = 0.1
"""Nats. Mixed precision and quantised engines stay below 0.04; a wrong template or temperature starts near 0.5."""
RATIO_EDGES = (0.5, 0.8, 0.95, 0.99, 1.01, 1.05, 1.25, 2.0)
"""Edges of the ratio's histogram; a bin holds its lower edge."""
RATIO_BOUNDS = (0.0, 2.0)
"""The default interval of `tis` and `clip-or-pop`; the fraction outside says what they would touch."""


def check(
    batch: TrainBatch,
    *,
    old_is_rollout: bool = False,
    fresh: npt.NDArray[np.bool_] | None = None,
    max_mean_abs_diff: float = MAX_MEAN_ABS_DIFF,
    exact: bool = False,
) -> Report:
    """Compare the old policy's log-probs with those the engine recorded, over trained tokens.

    Args:
        old_is_rollout: The run takes the engine's log-probs as the old policy; then there is nothing to compare.
        fresh: bool[N], tokens that the trainer's own weights sampled; see `versions.fresh_tokens`. The others differ
            also because the policy has moved on, which is no fault of either side. Fresh tokens alone are judged;
            without any, the figures are reported and the verdict is unavailable. None is all.
        max_mean_abs_diff: Nats beyond which the mean of \\|d\\| breaks the contract.
        exact: The run promises identical log-probs (true-on-policy): one fresh token that differs breaks the contract.
    """
    if old_is_rollout or batch.old_logprobs is None or not batch.num_loss_tokens:
        return Report(name="logprobs", status=Verdict.UNAVAILABLE)
    mask = batch.loss_mask
    d = batch.old_logprobs[mask].astype(np.float64) - batch.rollout_logprobs[mask].astype(np.float64)
    ratio = np.exp(np.clip(d, -20.0, 20.0))
    mean = float(np.abs(d).mean())
    low, high = RATIO_BOUNDS
    fresh = np.ones(d.shape, np.bool_) if fresh is None else fresh[mask]
    judged = float(np.abs(d[fresh]).mean()) if fresh.any() else 0.0
    largest = float(np.abs(d[fresh]).max(initial=0.0))
    broken = math.isnan(mean) or not judged <= max_mean_abs_diff or (exact and largest != 0.0)
    passed = Verdict.OK if fresh.any() else Verdict.UNAVAILABLE
    return Report(
        name="logprobs",
        status=Verdict.BROKEN if broken else passed,
        metrics={
            "contract/logprobs/abs_diff_mean": mean,
            "contract/logprobs/abs_diff_max": float(np.abs(d).max()),
            "contract/logprobs/kl_k1": float(-d.mean()),
            "contract/logprobs/kl_k3": float((np.expm1(np.clip(d, -20.0, 20.0)) - np.clip(d, -20.0, 20.0)).mean()),
            "contract/logprobs/ratio_mean": float(ratio.mean()),
            "contract/logprobs/ratio_min": float(ratio.min()),
            "contract/logprobs/ratio_max": float(ratio.max()),
            "contract/logprobs/ratio_outside_fraction": float(((ratio < low) | (ratio > high)).mean()),
            "contract/logprobs/fresh_fraction": float(fresh.mean()),
            **(_fresh(judged, largest) if fresh.any() else {}),
            **{f"contract/logprobs/ratio_bin/{name}": float(part.mean()) for name, part in histogram(ratio).items()},
        },
        offenders=_worst(d, batch.sequence_ids[mask]) if broken else (),
    )


def _fresh(mean: float, largest: float) -> dict[str, float]:
    return {"contract/logprobs/abs_diff_mean_fresh": mean, "contract/logprobs/abs_diff_max_fresh": largest}


def histogram(ratio: Any) -> dict[str, Any]:
    """Indicator per bin of `RATIO_EDGES`, for a NumPy array or a tensor of ratios: their means are the histogram."""
    lows, highs = (0.0, *RATIO_EDGES), (*RATIO_EDGES, math.inf)
    names = (
        f"to_{RATIO_EDGES[0]:g}",
        *(f"{a:g}_to_{b:g}" for a, b in pairwise(RATIO_EDGES)),
        f"over_{RATIO_EDGES[-1]:g}",
    )
    return {name: (ratio >= low) & (ratio < high) for name, low, high in zip(names, lows, highs, strict=True)}


def _worst(
    d: np.ndarray[tuple[int], np.dtype[np.float64]], sequence_ids: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> tuple[str, ...]:
    sequences, index = np.unique(sequence_ids, return_inverse=True)
    means = np.bincount(index, weights=np.abs(d)) / np.bincount(index)
    order = np.argsort(-means, kind="stable")[:MAX_OFFENDERS]
    return tuple(f"sequence {int(sequences[s])}: mean |difference| {means[s]:.4g} nats" for s in order)
