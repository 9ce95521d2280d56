"""One micro-batch as the model reads it: packed tokens, their positions, what to score, which experts to replay.

It travels through Megatron as its `PackedSeqParams`, the one argument that the pipeline, recomputation and every layer
hand on untouched. Attention reads `layout`, rotation reads `positions`, routers read `routes`, the head the rest.

Letters: N tokens of the packed row with padding, n those of this rank, K scored positions, L MoE layers, k experts a
token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from miles_core.trainer.packing import Layout, lay_out, scored_positions
from miles_core.types import UNRECORDED, TrainBatch


@dataclass
class Packed(PackedSeqParams):  # type: ignore[misc]
    """Everything but `layout` is on the device; created by `pack`."""

    token_ids: Tensor | None = None
    """i64[1, n] of this rank's part of the row."""
    positions: Tensor | None = None
    """i64[n], from 0 in each sequence."""
    layout: Layout | None = None
    """Of the whole row, padding being one more sequence."""
    scored: Tensor | None = None
    """i64[K] packed positions whose token is scored, ascending, over the whole row."""
    targets: Tensor | None = None
    """i64[K] their tokens."""
    inverse_temperature: Tensor | None = None
    """f64[K]"""
    start: int = 0
    """Position in the row of this rank's first token."""
    entropy_grad: bool = False
    routes: Tensor | None = None
    """i64[tokens that a router of this rank sees, L, k]; rows of `UNRECORDED` take the router's own choice."""
    counts: bool = False
    """Count where the routers' own choices differ from `routes`."""
    replays: bool = False
    """Send tokens to the experts of `routes`."""


@dataclass(frozen=True, slots=True)
class Share:
    """This rank's place among the ranks that share one packed row."""

    context_rank: int = 0
    context_size: int = 1
    tensor_rank: int = 0
    tensor_size: int = 1
    sequence_parallel: bool = False

    @property
    def sees_own_tokens(self) -> bool:
        """Whether no other rank's routers see the same tokens, or this is the first of those whose do."""
        return self.sequence_parallel or self.tensor_rank == 0

    @property
    def multiple(self) -> int:
        """The row's length must be a multiple of this."""
        return self.context_size * (self.tensor_size if self.sequence_parallel else 1)


def row_length(tokens: int, share: Share) -> int:
    """Length of the packed row of some tokens: a multiple that every rank can take its part of, never 0."""
    return -(-max(tokens, 1) // share.multiple) * share.multiple


def pack(
    batch: TrainBatch, share: Share, device: torch.device, *, length: int | None = None, routed: bool = False
) -> Packed:
    """The forward pass that scores the trained tokens of `batch`. An empty batch is padding alone.

    Args:
        length: Of the row, at least the batch's; None is as short as can be.
        routed: Carry the batch's routes.
    """
    lengths = [int(n) for n in batch.lengths]
    padding = (length or row_length(batch.num_tokens, share)) - batch.num_tokens
    sizes = np.array([*lengths, padding] if padding else lengths, dtype=np.int64)
    token_ids = np.concatenate([batch.token_ids.astype(np.int64), np.zeros(padding, np.int64)])
    positions = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    scored = scored_positions(batch)
    inverse = 1.0 / batch.temperatures.astype(np.float64)[batch.sequence_ids[scored]]

    each = token_ids.shape[0] // share.context_size
    mine = slice(share.context_rank * each, (share.context_rank + 1) * each)
    routes = None
    if routed and batch.routes is not None:
        blank = np.full((padding, *batch.routes.shape[1:]), UNRECORDED, np.int64)
        seen = np.concatenate([batch.routes.astype(np.int64), blank])[mine]
        if share.sequence_parallel:
            part = each // share.tensor_size
            seen = seen[share.tensor_rank * part : (share.tensor_rank + 1) * part]
        routes = torch.from_numpy(np.ascontiguousarray(seen)).to(device)
    return Packed(
        qkv_format="packed",
        token_ids=torch.from_numpy(token_ids[mine])[None].to(device),
        positions=torch.from_numpy(positions[mine]).to(device),
        layout=lay_out(sizes, device),
        scored=torch.from_numpy(scored).to(device),
        targets=torch.from_numpy(token_ids[scored]).to(device),
        inverse_temperature=torch.from_numpy(inverse).to(device),
        start=share.context_rank * each,
        routes=routes,
    )
