"""The operators on a CPU. A row's result depends on nothing but the row: not on its neighbours, place or number.

Two means. Elementwise work uses only operations that IEEE 754 rounds correctly (add, multiply, divide, compare): vector
loops and their scalar tails then agree, which they do not for a library's exp, SiLU or even square root. Sums are
halvings in one order. Matrix products run on tiles of one shape, whose rows the tests show not to depend on their
place; all of it on one thread, since a library may cut the inner dimension by the number of threads.

Letters: M rows, K inner, N outputs, T query tokens, Q query heads, H key-value heads, D head dimensions.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from miles_core.numerics.spans import Tiles

ROWS = 32
"""Rows of a matrix product's tile."""
QUERIES = 8
"""Query tokens of an attention tile."""
TILES = 4
"""Attention tiles computed together: a batched product of one shape."""
KEYS = 64
"""Keys of an attention block."""

LOG2_E = 1.4426950408889634
LN2_HIGH = 0.693359375
"""ln 2 to 9 bits: its product with a small integer is exact in float32."""
LN2_LOW = math.log(2.0) - LN2_HIGH
EXP_FLOOR = -87.0
"""exp is 0 below: 1.6e-38 is the last number before float32 turns denormal."""
EXP_TERMS = tuple(1.0 / math.factorial(n) for n in range(7, -1, -1))
LOG_TERMS = tuple(2.0 / n for n in range(21, 0, -2))


def one_thread() -> None:
    """Make this thread's matrix products single-threaded: the order of a sum must not depend on a count of threads."""
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension by halving: ``f[..., n] -> f[...]``, in an order that only n decides."""
    while x.shape[-1] > 1:
        if x.shape[-1] % 2:
            x = F.pad(x, (0, 1))
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def exp(x: Tensor) -> Tensor:
    """exp of float32 values <= 0 within 2 units in the last place; exactly 1 at 0 and 0 below `EXP_FLOOR`."""
    bounded = x.clamp_min(EXP_FLOOR)
    n = (bounded * LOG2_E).round_()
    r = (bounded - n * LN2_HIGH) - n * LN2_LOW
    # Horner with separate multiplications and additions: a fused one would round differently in a loop's tail.
    result = torch.full_like(r, EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        result = result.mul_(r).add_(term)
    power = ((n.to(torch.int32) + 127) << 23).view(torch.float32)
    return torch.where(x < EXP_FLOOR, torch.zeros((), dtype=x.dtype), result.mul_(power))


def log(x: Tensor) -> Tensor:
    """log of positive numbers, computed in float64 and returned in x's dtype: ``log x = e ln 2 + 2 artanh(t)``."""
    fraction, exponent = torch.frexp(x.double())
    low = fraction < math.sqrt(0.5)
    fraction = torch.where(low, fraction * 2, fraction)
    e = (exponent - low.to(exponent.dtype)).double()
    t = (fraction - 1) / (fraction + 1)
    square = t * t
    series = torch.full_like(t, LOG_TERMS[0])
    for term in LOG_TERMS[1:]:
        series = series.mul_(square).add_(term)
    return (e * math.log(2.0) + series * t).to(x.dtype)


def sqrt(x: Tensor) -> Tensor:
    """Correctly rounded square root of float32; torch's own goes through a vector library that is not."""
    return torch.from_numpy(np.sqrt(x.numpy()))


def sigmoid(x: Tensor) -> Tensor:
    e = exp(-x.abs())
    return torch.where(x >= 0, torch.ones_like(e), e) / (1 + e)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``f[M, K], f[N, K] -> f[M, N]`` in x's dtype, summed in float32."""
    one_thread()
    rows, wide = x.shape[0], weight.float()
    padded = -(-rows // ROWS) * ROWS
    inputs = F.pad(x.float(), (0, 0, 0, padded - rows)) if padded != rows else x.float().contiguous()
    output = inputs.new_empty((padded, weight.shape[0]))
    for first in range(0, padded, ROWS):
        torch.mm(inputs[first : first + ROWS], wide.t(), out=output[first : first + ROWS])
    return output[:rows].to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``f[M, K], f[K] -> f[M, K]`` and the float32 reciprocal of each row's root mean square ``[M]``."""
    wide = x.float()
    mean = tree_sum(wide * wide) / x.shape[-1]
    inverse = torch.ones_like(mean) / sqrt(mean + eps)
    return weight * (wide * inverse[:, None]).to(x.dtype), inverse


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` in float32, rounded once."""
    wide = gate.float()
    return (wide * sigmoid(wide) * up.float()).to(gate.dtype)


def logsumexp(x: Tensor) -> Tensor:
    """``f32[M, N] -> f32[M]``"""
    peak = x.amax(-1)
    return peak + log(tree_sum(exp(x - peak[:, None])))


def attention(query: Tensor, keys: Tensor, values: Tensor, tiles: Tiles, scale: float) -> Tensor:
    """Causal attention of every span over its own keys: ``[T, Q, D] -> [T, Q, D]``.

    Args:
        keys, values: ``[rows, H, D]``; a span's keys are consecutive rows from its `kv_row`.
        tiles: Of `QUERIES` query tokens.
    """
    one_thread()
    output = torch.empty_like(query)
    for first in range(0, len(tiles.first_token), TILES):
        chosen = np.minimum(np.arange(first, first + TILES), len(tiles.first_token) - 1)
        within = np.arange(QUERIES)
        start, count = tiles.start[chosen][:, None], tiles.count[chosen][:, None]
        at = np.minimum(within, count - 1)  # cells past a tile's end repeat its last query
        tokens = torch.from_numpy(tiles.first_token[chosen][:, None] + at)
        found = _attend(
            query[tokens.reshape(-1)].float().view(TILES, QUERIES, *query.shape[1:]),
            keys,
            values,
            torch.from_numpy(tiles.kv_row[chosen]),
            torch.from_numpy(start + at),
            scale,
        )
        real = torch.from_numpy((within < count) & (np.arange(first, first + TILES) == chosen)[:, None])
        output[tokens[real]] = found[real].to(query.dtype)
    return output


def _attend(query: Tensor, keys: Tensor, values: Tensor, kv_rows: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Tiles of one shape, in float32: queries ``[tiles, queries, Q, D]`` at ``positions [tiles, queries]``.

    A block that a query does not see leaves its running maximum, sum and output as they are, bit for bit, so that the
    longest tile may decide how many blocks all of them go through.
    """
    heads, dims = keys.shape[1:]
    groups = query.shape[2] // heads
    rows = QUERIES * groups
    q = query.view(TILES, QUERIES, heads, groups, dims).permute(0, 2, 1, 3, 4).reshape(TILES * heads, rows, dims)
    seen_to = positions[:, None, :, None].expand(TILES, heads, QUERIES, groups).reshape(TILES * heads, rows, 1)
    ends = positions.amax(1)
    peak = q.new_full((TILES * heads, rows), float("-inf"))
    total = q.new_zeros((TILES * heads, rows))
    output = q.new_zeros((TILES * heads, rows, dims))
    for begin in range(0, int(ends.max()) + 1, KEYS):
        block = torch.arange(begin, begin + KEYS)
        # Places past a tile's last key repeat it: memory beyond may hold anything, and 0 times NaN is NaN.
        at = (kv_rows[:, None] + torch.minimum(block, ends[:, None])).reshape(-1)
        k, v = (
            x[at].float().view(TILES, KEYS, heads, dims).transpose(1, 2).reshape(-1, KEYS, dims) for x in (keys, values)
        )
        scores = torch.bmm(q, k.transpose(1, 2)) * scale
        scores = torch.where(block <= seen_to, scores, float("-inf"))
        higher = torch.maximum(peak, scores.amax(-1))
        weights = exp(scores - higher[..., None])
        kept = exp(peak - higher)
        total = total * kept + tree_sum(weights)
        output = output * kept[..., None] + torch.bmm(weights, v)
        peak = higher
    output = output / total[..., None]
    return output.view(TILES, heads, QUERIES, groups, dims).transpose(1, 2).reshape(query.shape)
