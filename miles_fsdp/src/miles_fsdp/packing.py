"""Packed micro-batches of a transformers model: whole sequences in one row, and the attention that keeps them apart.

Letters: N packed tokens, S sequences, K scored positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from miles_core.errors import PluginError
from miles_core.trainer.packing import Layout, attend, lay_out, scored_positions
from miles_core.types import TrainBatch

ATTENTION = "miles_packed"
"""Name of `packed_attention` in the registry of transformers."""


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
    return attend(query, key, value, packed_layout, scale=scaling, window=sliding_window), None
