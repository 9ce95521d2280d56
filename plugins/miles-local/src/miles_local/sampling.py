"""Sampling: one token per row, and its log-prob under the temperature-scaled, full-vocabulary policy.

A row's token is a function of its logits, its parameters and one number in [0, 1) that comes from the request's seed
and the token's position: the rest of the batch has no part in it. Top-k, top-p and min-p restrict what is sampled and
leave the log-prob alone.

Shapes: S rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 256
"""The inverse of the distribution is found in two levels of sums: exact enough in float32, and never a V-long scan."""

HEAD = 1024
"""Top-p looks for its mass among this many candidates before it sorts the vocabulary."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How to sample one row."""

    temperature: float
    """0 takes the argmax, with the log-prob of temperature 1."""
    top_p: float
    top_k: int
    min_p: float
    uniform: float
    """In [0, 1)."""

    @property
    def restricted(self) -> bool:
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


def uniform(seed: str, position: int) -> float:
    """The number in [0, 1) that belongs to a seed and a position of the row; the same on every machine."""
    digest = hashlib.blake2b(f"{seed}|{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / float(1 << 53)


def sample(logits: Tensor, draws: Sequence[Draw]) -> tuple[list[int], list[float]]:
    """Sample every row.

    Args:
        logits: [S, V] in any floating dtype; computed on in float32 (float64 stays).
        draws: S ways to sample.

    Returns:
        S token ids and S log-probs; a log-prob is NaN where the logits are.
    """
    rows, vocab = logits.shape
    width = -(-vocab // BLOCK) * BLOCK
    precise = torch.float64 if logits.dtype == torch.float64 else torch.float32
    scaled = logits.new_full((rows, width), float("-inf"), dtype=precise)
    scaled[:, :vocab] = logits
    temperatures = [draw.temperature or 1.0 for draw in draws]
    if any(temperature != 1.0 for temperature in temperatures):
        scaled /= torch.tensor(temperatures, dtype=precise, device=logits.device)[:, None]
    peak = scaled.amax(-1, keepdim=True)
    weights = (scaled - peak).exp_()
    sums = weights.view(rows, -1, BLOCK).sum(-1).double()
    totals = sums.sum(-1)
    for row, draw in enumerate(draws):
        if draw.restricted:
            kept = _support(weights[row, :vocab], draw)
            weights[row] = torch.zeros_like(weights[row]).scatter_(0, kept, weights[row, kept])
            sums[row] = weights[row].view(-1, BLOCK).sum(-1)
    chosen = _invert(weights, sums, [draw.uniform for draw in draws])
    greedy = [row for row, draw in enumerate(draws) if draw.temperature == 0]
    if greedy:
        chosen[greedy] = scaled[greedy].argmax(-1)
    logprobs = scaled.gather(1, chosen[:, None]).double() - peak.double() - totals.log()[:, None]
    return chosen.tolist(), [min(value, 0.0) if value == value else value for value in logprobs[:, 0].tolist()]


def _support(weights: Tensor, draw: Draw) -> Tensor:
    """Ids that may be sampled: i64[kept]. Top-k first, then top-p of what is left, then min-p of the peak.

    Weights are ``exp(logit - max)``, so the peak weighs 1.
    """
    if draw.top_k == 0 and draw.top_p >= 1:
        return torch.nonzero(weights >= draw.min_p)[:, 0]
    count = min(draw.top_k or HEAD, weights.shape[0])
    values, ids = weights.topk(count)
    mass = values.sum() if draw.top_k else weights.sum()
    if draw.top_k == 0 and values.sum() < draw.top_p * mass:
        values, ids = weights.sort(descending=True, stable=True)
    kept = values >= draw.min_p
    if draw.top_p < 1:
        # A token stays when those before it do not hold the mass yet: the smallest set that does, never empty.
        kept &= values.double().cumsum(0) - values < draw.top_p * mass
    return ids[kept]


def _invert(weights: Tensor, sums: Tensor, uniforms: list[float]) -> Tensor:
    """The id at which the running sum of weights passes ``uniform * total``: i64[S].

    Args:
        weights: [S, blocks * BLOCK], not negative, some positive.
        sums: f64[S, blocks] of each block.
    """
    rows = torch.arange(weights.shape[0], device=weights.device)
    running = sums.cumsum(-1)
    total = running[:, -1]
    target = torch.tensor(uniforms, dtype=torch.float64, device=weights.device) * total
    # The product may round up to the total itself, which no running sum passes.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    block = (running <= target[:, None]).sum(-1).clamp_(max=sums.shape[1] - 1)
    before = running[rows, block] - sums[rows, block]
    inside = weights.view(weights.shape[0], -1, BLOCK)[rows, block].double()
    place = (inside.cumsum(-1) <= (target - before)[:, None]).sum(-1)
    # Rounding may push the target past the block's end, or onto weights of 0 there: take the last id that can be
    # sampled.
    last = BLOCK - 1 - (inside > 0).flip(-1).int().argmax(-1)
    return block * BLOCK + torch.minimum(place, last)
