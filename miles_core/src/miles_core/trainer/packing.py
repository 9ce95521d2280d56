"""Attention over packed sequences: whole sequences in one row, kept apart without an N x N mask.

One row of N tokens wastes nothing in the linear layers. Attention must not cross sequences; a dense [N, N] mask would
make it quadratic in N, so sequences of similar length lie side by side (`[s, heads, t, d]`, padded at the end), where
plain causal attention is exact: a padding key lies after every real query of its row.

Letters: N packed tokens, S sequences, K scored positions, s and t the rows and width of one tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from miles_core.numerics.spans import Span, Spans
from miles_core.types import Int64, TrainBatch

_PADDING = 1.25
"""Longest over shortest sequence of a tile at most: at most 1.25^2 = 1.6 times the work, for few tiles."""

_WIDEN_UP_TO = 512
"""On a CPU the backward of bfloat16 attention takes 4 times that of float32 up to this width, and less above it."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Sequences of similar length, one a row."""

    rows: int
    width: int
    gather: Tensor
    """i64[s * t] packed position of each cell; padding cells repeat the row's first token."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Tiles that hold every packed token once, and the way back."""

    tiles: tuple[Tile, ...]
    restore: Tensor
    """i64[N] cell of each packed token in the tiles' concatenated cells."""
    spans: Spans
    """The sequences themselves, for attention that wants no tiles of equal length."""


def scored_positions(batch: TrainBatch) -> Int64:
    """i64[K] trained tokens that have a prefix."""
    first = np.zeros(batch.num_tokens, dtype=np.bool_)
    first[batch.offsets[:-1][batch.lengths > 0]] = True
    return np.flatnonzero(batch.loss_mask & ~first).astype(np.int64)


def lay_out(lengths: Int64, device: torch.device) -> Layout:
    """Place sequences into tiles of similar length, longest first."""
    starts = np.cumsum(lengths) - lengths
    order = [int(s) for s in np.argsort(-lengths, kind="stable") if lengths[s] > 0]
    tiles: list[Tile] = []
    restore = np.zeros(int(lengths.sum()), dtype=np.int64)
    offset = 0
    while order:
        width = int(lengths[order[0]])
        members = [s for s in order if lengths[s] * _PADDING >= width]
        order = order[len(members) :]
        cells = np.repeat(starts[members][:, None], width, axis=1)
        for row, s in enumerate(members):
            span = np.arange(lengths[s])
            cells[row, span] = starts[s] + span
            restore[starts[s] + span] = offset + row * width + span
        offset += cells.size
        gather = torch.from_numpy(cells.reshape(-1).astype(np.int64)).to(device)
        tiles.append(Tile(len(members), width, gather))
    spans = [Span(int(start), int(count), 0, int(start)) for start, count in zip(starts, lengths, strict=True) if count]
    return Layout(tuple(tiles), torch.from_numpy(restore).to(device), Spans(spans))


def attend(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, *, scale: float | None = None, window: int | None = None
) -> Tensor:
    """Causal attention within each packed sequence.

    Args:
        query, key, value: f[1, heads, N, d]; keys and values may have fewer heads (GQA), values another d.
        scale: Of the logits; None is ``1 / sqrt(d)``.
        window: Tokens a query sees at most, itself included; None is all before it.

    Returns:
        f[1, N, heads, d of the values]
    """
    outputs = [_attend(query, key, value, tile, scale, window) for tile in layout.tiles]
    cells = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return cells.index_select(0, layout.restore)[None]


def _attend(query: Tensor, key: Tensor, value: Tensor, tile: Tile, scaling: float | None, window: int | None) -> Tensor:
    """One tile: f[s * t, heads, d]."""
    q, k, v = (_rows(x, tile) for x in (query, key, value))
    widen = query.dtype != torch.float64 and query.device.type == "cpu" and tile.width <= _WIDEN_UP_TO
    if widen:
        q, k, v = q.float(), k.float(), v.float()
    mask = None
    if window is not None and tile.width > window:
        at = torch.arange(tile.width, device=query.device)
        distance = at[:, None] - at[None, :]
        mask = (distance >= 0) & (distance < window)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=k.shape[1] != q.shape[1]
    )
    out = out.to(query.dtype)
    return out.transpose(1, 2).reshape(tile.rows * tile.width, out.shape[1], out.shape[3])


def _rows(x: Tensor, tile: Tile) -> Tensor:
    """f[1, heads, N, d] -> f[s, heads, t, d]"""
    picked = x[0].index_select(1, tile.gather)
    return picked.view(x.shape[1], tile.rows, tile.width, x.shape[3]).transpose(0, 1)
