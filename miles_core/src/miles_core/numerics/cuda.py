"""The operators on an NVIDIA GPU, in Triton: block shapes are constants, so that no batch decides the order of a sum.

Every program walks its reduction (the inner dimension, the keys, a row) from the first element in steps of one size.
Nothing is split among programs, and a block that contributes nothing leaves the running values as they are. The number
of rows is not specialised on: one compiled kernel serves every batch.

Letters: M rows, K inner, N outputs, T query tokens, Q query heads, H key-value heads, D head dimensions.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_core.numerics.spans import Spans

FEW_ROWS = 64
"""Up to here a matrix product is bound by reading the weight, and wants many small tiles."""
SMALL: Sequence[Mapping[str, int]] = (
    {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4},
    {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4},
)
"""Tiles for few rows, the faster first. Which of them adds up like `LARGE` depends on the device's matrix units."""
LARGE: Mapping[str, int] = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
"""Tile for many rows."""
ATTENTION_ROWS = 64
"""Query tokens times heads of a group in one attention tile, also while decoding, where most rows are empty: reading
the keys is what takes the time then, and a smaller tile would run on other instructions, with other sums."""
KEYS = 64
"""Keys of an attention block."""
SUM_BLOCK = 4096
"""Logits read at a time by `logsumexp`."""


@triton.jit(do_not_specialize=["M"])  # type: ignore[untyped-decorator]
def _linear_kernel(  # type: ignore[no-untyped-def]
    x, w, out, M, N, K, stride_x, stride_w, stride_out,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out[m, n] = sum_k x[m, k] w[n, k], accumulated over k in blocks from 0 in float32."""
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    # Neighbouring programs share rows or columns, for the cache; which program computes a tile does not touch its sum.
    band = pid // (GROUP * tiles_n)
    band_rows = min(tiles_m - band * GROUP, GROUP)
    tile_m = band * GROUP + (pid % (GROUP * tiles_n)) % band_rows
    tile_n = (pid % (GROUP * tiles_n)) // band_rows
    rows = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    x_at = x + rows[:, None] * stride_x + inner[None, :]
    w_at = w + columns[None, :] * stride_w + inner[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        left = tl.load(x_at + k, mask=(rows[:, None] < M) & (inner[None, :] + k < K), other=0.0)
        right = tl.load(w_at + k, mask=(columns[None, :] < N) & (inner[:, None] + k < K), other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    here = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(out + rows[:, None] * stride_out + columns[None, :], total.to(out.dtype.element_ty), mask=here)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``f[M, K], f[N, K] -> f[M, N]`` in x's dtype, summed in float32."""
    small, agree = small_tile(x.device.index or 0)
    return _linear(x, weight, LARGE if agree and x.shape[0] > FEW_ROWS else small, x.dtype)


def _linear(x: Tensor, weight: Tensor, tile: Mapping[str, int], dtype: torch.dtype) -> Tensor:
    rows, inner = x.shape
    outputs = weight.shape[0]
    x, weight = x.contiguous(), weight.contiguous()
    out = x.new_empty((rows, outputs), dtype=dtype)
    grid = (triton.cdiv(rows, tile["BLOCK_M"]) * triton.cdiv(outputs, tile["BLOCK_N"]),)
    _linear_kernel[grid](x, weight, out, rows, outputs, inner, inner, inner, outputs, GROUP=8, **tile)
    return out


@triton.jit(do_not_specialize=["M"])  # type: ignore[untyped-decorator]
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x, weight, out, inverse_out, M, K, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    here = (rows[:, None] < M) & (columns[None, :] < K)
    at = rows[:, None] * K + columns[None, :]
    wide = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=1) / K + eps)
    normal = (wide * inverse[:, None]).to(out.dtype.element_ty)
    scale = tl.load(weight + columns, mask=columns < K, other=0.0)
    tl.store(out + at, normal * scale[None, :], mask=here)
    tl.store(inverse_out + rows, inverse, mask=rows < M)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``f[M, K], f[K] -> f[M, K]`` and the float32 reciprocal of each row's root mean square ``[M]``."""
    x = x.contiguous()
    rows, width = x.shape
    out = torch.empty_like(x)
    inverse = torch.empty(rows, dtype=torch.float32, device=x.device)
    padded = triton.next_power_of_2(width)
    together = max(1, 1024 // padded)  # heads are narrow: several a program
    grid = (triton.cdiv(rows, together),)
    _rms_norm_kernel[grid](x, weight, out, inverse, rows, width, eps, ROWS=together, WIDTH=padded, num_warps=4)
    return out, inverse


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _silu_mul_kernel(gate, up, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < count
    g = tl.load(gate + at, mask=here, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=here, other=0.0).to(tl.float32)
    tl.store(out + at, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=here)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` in float32, rounded once."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    _silu_mul_kernel[(triton.cdiv(gate.numel(), 1024),)](gate, up, out, gate.numel(), BLOCK=1024, num_warps=4)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _logsumexp_kernel(x, out, N, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    # One running maximum and sum for each lane: they meet once, at the end, in the order of a tree.
    peak = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, N, BLOCK):
        value = tl.load(x + row * stride + first + columns, mask=first + columns < N, other=float("-inf"))
        higher = tl.maximum(peak, value)
        # A lane that has seen nothing but -inf stays at 0 instead of becoming NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(peak - base) + tl.exp(value - base)
        peak = higher
    top = tl.max(peak, axis=0)
    base = tl.where(peak == float("-inf"), top, peak)
    tl.store(out + row, top + tl.log(tl.sum(total * tl.exp(base - top), axis=0)))


def logsumexp(x: Tensor) -> Tensor:
    """``f32[M, N] -> f32[M]``"""
    x = x.contiguous()
    out = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    if x.shape[0]:
        _logsumexp_kernel[(x.shape[0],)](x, out, x.shape[1], x.shape[1], BLOCK=SUM_BLOCK, num_warps=8)
    return out


@triton.jit(do_not_specialize=["num_tiles"])  # type: ignore[untyped-decorator]
def _attention_kernel(  # type: ignore[no-untyped-def]
    query, keys, values, out, tiles, num_tiles, scale,
    stride_query, stride_key, stride_out,
    GROUPS: tl.constexpr, DIMS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One tile of queries and one key-value head; row r is query r // GROUPS and head r % GROUPS of the group."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(tiles + tile)
    count = tl.load(tiles + num_tiles + tile).to(tl.int32)
    start = tl.load(tiles + 2 * num_tiles + tile).to(tl.int32)
    base = tl.load(tiles + 3 * num_tiles + tile)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    which = rows // GROUPS
    real = which < count
    at = (first + which)[:, None] * stride_query + (head * GROUPS + rows % GROUPS)[:, None] * DIMS + dims[None, :]
    q = tl.load(query + at, mask=real[:, None], other=0.0)
    position = start + which
    end = start + count
    peak = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    result = tl.zeros((ROWS, DIMS), dtype=tl.float32)
    for begin in range(0, end, KEYS):
        place = begin + tl.arange(0, KEYS)
        stored = (base + place)[:, None] * stride_key + head * DIMS + dims[None, :]
        k = tl.load(keys + stored, mask=(place < end)[:, None], other=0.0)
        v = tl.load(values + stored, mask=(place < end)[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(place[None, :] <= position[:, None], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        kept = tl.exp(peak - higher)
        total = total * kept + tl.sum(weights, axis=1)
        result = tl.dot(weights.to(v.dtype), v, result * kept[:, None], input_precision="ieee")
        peak = higher
    result = (result / total[:, None]).to(out.dtype.element_ty)
    place = (first + which)[:, None] * stride_out + (head * GROUPS + rows % GROUPS)[:, None] * DIMS + dims[None, :]
    tl.store(out + place, result, mask=real[:, None])


def attention(query: Tensor, keys: Tensor, values: Tensor, spans: Spans, scale: float) -> Tensor:
    """Causal attention of every span over its keys: ``[T, Q, D] -> [T, Q, D]``; keys and values ``[rows, H, D]``."""
    heads, dims = keys.shape[1:]
    groups = query.shape[1] // heads
    query, keys, values = query.contiguous(), keys.contiguous(), values.contiguous()
    out = torch.empty_like(query)
    tiles = spans.table(ATTENTION_ROWS // groups, query.device)
    grid = (tiles.shape[1], heads)
    _attention_kernel[grid](
        query, keys, values, out, tiles, tiles.shape[1], scale,
        query.stride(0), keys.stride(0), out.stride(0),
        GROUPS=groups, DIMS=dims, ROWS=ATTENTION_ROWS, KEYS=KEYS, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


@functools.cache
def small_tile(index: int) -> tuple[Mapping[str, int], bool]:
    """The tile for few rows on device `index`, and whether `LARGE` gives the same float32 sums, bit for bit.

    Where no tile agrees, the first one serves every number of rows. Compared before rounding to bfloat16: matrix units
    that add up otherwise differ in a good part of the float32 sums, and in few of the rounded ones.
    """
    device = torch.device("cuda", index)
    draw = torch.Generator(device).manual_seed(0)
    with torch.inference_mode(), torch.cuda.device(device):
        x, weight = (torch.randn(rows, 4096, generator=draw, device=device).bfloat16() for rows in (256, 512))
        wanted = _linear(x, weight, LARGE, torch.float32)
        for tile in SMALL:
            if torch.equal(_linear(x, weight, tile, torch.float32), wanted):
                return tile, True
    return SMALL[0], False
