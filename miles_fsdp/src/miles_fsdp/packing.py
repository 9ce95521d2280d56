"""Packed micro-batches: whole sequences in one row, and attention that keeps them apart.

One row of N tokens wastes nothing in the linear layers. Attention must not cross sequences; a dense [N, N] mask would
make it quadratic in N, so `packed_attention` lays sequences of similar length side by side (`[s, heads, t, d]`, padded
at the end), where plain causal attention is exact: a padding key lies after every real query of its row.

Letters: N packed tokens, S sequences, K scored positions, s and t the rows and width of one tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from miles_core.errors import PluginError
from miles_core.types import Int64, TrainBatch

ATTENTION = "miles_packed"
"""Name of `packed_attention` in the registry of transformers."""

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


@dataclass(frozen=True, slots=True)
class Packed:
    """What one forward pass reads. No pytree: FSDP must not cast temperatures to the compute dtype."""

    token_ids: Tensor
    """i64[1, N]"""
    position_ids: Tensor
    """i64[1, N], from 0 in each sequence"""
    layout: Layout
    scored: Tensor
    """i64[K] packed positions whose token is scored, ascending; never a sequence's first."""
    inverse_temperature: Tensor
    """f[K]"""


def pack(batch: TrainBatch, device: torch.device) -> Packed:
    """The forward pass that scores the trained tokens of `batch`.

    An empty batch becomes one unscored token, so that a rank without work still takes part in every collective. With
    nothing to score, K is 0.
    """
    if batch.num_sequences == 0:
        lengths = np.ones(1, dtype=np.int64)
        token_ids = np.zeros(1, dtype=np.int64)
        scored = np.zeros(0, dtype=np.int64)
        temperatures = np.ones(1, dtype=np.float64)
    else:
        lengths, token_ids = batch.lengths, batch.token_ids.astype(np.int64)
        scored = scored_positions(batch)
        temperatures = batch.temperatures.astype(np.float64)
    positions = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    sequence_ids = np.repeat(np.arange(lengths.shape[0]), lengths)
    return Packed(
        token_ids=torch.from_numpy(token_ids)[None].to(device),
        position_ids=torch.from_numpy(positions)[None].to(device),
        layout=lay_out(lengths, device),
        scored=torch.from_numpy(scored).to(device),
        inverse_temperature=torch.from_numpy(1.0 / temperatures[sequence_ids[scored]]).to(device),
    )


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
    return Layout(tuple(tiles), torch.from_numpy(restore).to(device))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_layout: Layout | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence; the signature is that of transformers' attention functions.

    Args:
        query, key, value: f[1, heads, N, d]; keys and values may have fewer heads (GQA).

    Returns:
        f[1, N, heads, d] and no attention weights.
    """
    if packed_layout is None or attention_mask is not None or softcap is not None or s_aux is not None:
        raise PluginError(
            "packed attention does not fit this architecture",
            expected="causal softmax attention without soft-cap or sinks, and layers that pass keyword arguments on",
            found=f"{type(module).__name__}",
            do="set backend.attn_implementation: eager",
        )
    outputs = [_attend(query, key, value, tile, scaling, sliding_window) for tile in packed_layout.tiles]
    cells = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return cells.index_select(0, packed_layout.restore)[None], None


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
