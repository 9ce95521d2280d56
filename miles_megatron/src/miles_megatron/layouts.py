"""How the tensors of a checkpoint lie in one Megatron parameter, and how that is cut over tensor-parallel ranks.

A layout is a pair of pure functions that undo each other bit for bit, for any number of shards that divides:

    split(tensors, shards, heads) -> one tensor per shard
    join(shards, heads)           -> the tensors of the checkpoint

Letters: P shards, H hidden width, F width of an MLP, V vocabulary, d width of a head, g key-value heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Heads:
    """What a layout must know of the model beside the tensors."""

    query: int
    key_value: int
    vocab: int
    """Rows of the embedding in the checkpoint."""

    def of_shard(self, shards: int, rank: int) -> Heads:
        """What one shard holds."""
        rows = self.padded_vocab(shards) // shards
        return Heads(self.query // shards, self.key_value // shards, max(0, min(rows, self.vocab - rank * rows)))

    def padded_vocab(self, shards: int) -> int:
        """Rows of the embedding over all shards: the smallest multiple that holds the vocabulary."""
        return -(-self.vocab // shards) * shards


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A named pair of functions.

    Each shard holds one block of each checkpoint tensor: `torch.chunk` along `tensor_axis`. So ``join([shard])`` gives
    those blocks, with the heads and tokens of one shard.
    """

    name: str
    axis: int | None
    """Axis of the Megatron parameter that is cut, None for none."""
    tensor_axis: int | None
    """Axis of the checkpoint tensors that is cut."""
    split: Callable[[Sequence[Tensor], int, Heads], list[Tensor]]
    join: Callable[[Sequence[Tensor], Heads], list[Tensor]]


def _cut(axis: int) -> Callable[[Sequence[Tensor], int, Heads], list[Tensor]]:
    def split(tensors: Sequence[Tensor], shards: int, heads: Heads) -> list[Tensor]:
        (tensor,) = tensors
        return [shard.contiguous() for shard in tensor.chunk(shards, axis)]

    return split


def _glue(axis: int) -> Callable[[Sequence[Tensor], Heads], list[Tensor]]:
    def join(shards: Sequence[Tensor], heads: Heads) -> list[Tensor]:
        return [shards[0] if len(shards) == 1 else torch.cat(list(shards), axis)]

    return join


def _copies(tensors: Sequence[Tensor], shards: int, heads: Heads) -> list[Tensor]:
    (tensor,) = tensors
    return [tensor] * shards


def _first(shards: Sequence[Tensor], heads: Heads) -> list[Tensor]:
    return [shards[0]]


def _split_vocab(tensors: Sequence[Tensor], shards: int, heads: Heads) -> list[Tensor]:
    (tensor,) = tensors
    missing = heads.padded_vocab(shards) - tensor.shape[0]
    padded = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor
    return [shard.contiguous() for shard in padded.chunk(shards)]


def _join_vocab(shards: Sequence[Tensor], heads: Heads) -> list[Tensor]:
    return [torch.cat(list(shards))[: heads.vocab].contiguous()]


def _split_qkv(tensors: Sequence[Tensor], shards: int, heads: Heads) -> list[Tensor]:
    """q [h d, …], k and v [g d, …]  ->  P x [g / P x (h / g + 2) x d, …]: each key-value head after its queries."""
    query, key, value = tensors
    rest = query.shape[1:]
    groups = heads.key_value
    width = key.shape[0] // groups
    q = query.reshape(groups, -1, width, *rest)
    k, v = (each.reshape(groups, 1, width, *rest) for each in (key, value))
    fused = torch.cat([q, k, v], 1).reshape(-1, *rest)
    return [shard.contiguous() for shard in fused.chunk(shards)]


def _join_qkv(shards: Sequence[Tensor], heads: Heads) -> list[Tensor]:
    fused = torch.cat(list(shards))
    rest = fused.shape[1:]
    groups = heads.key_value
    each = heads.query // groups
    grouped = fused.reshape(groups, each + 2, -1, *rest)
    parts = torch.split(grouped, [each, 1, 1], 1)
    return [part.reshape(-1, *rest).contiguous() for part in parts]


def _split_gate_up(tensors: Sequence[Tensor], shards: int, heads: Heads) -> list[Tensor]:
    """gate and up [F, H]  ->  P x [2 F / P, H]: a shard's gate rows, then its up rows."""
    gate, up = tensors
    return [torch.cat(pair) for pair in zip(gate.chunk(shards), up.chunk(shards), strict=True)]


def _join_gate_up(shards: Sequence[Tensor], heads: Heads) -> list[Tensor]:
    halves = [shard.chunk(2) for shard in shards]
    return [torch.cat([half[part] for half in halves]) for part in range(2)]


def _split_stacked(tensors: Sequence[Tensor], shards: int, heads: Heads) -> list[Tensor]:
    """gate and up [F, H]  ->  P x [2, F / P, H]"""
    return [shard.contiguous() for shard in torch.stack(list(tensors)).chunk(shards, 1)]


def _join_stacked(shards: Sequence[Tensor], heads: Heads) -> list[Tensor]:
    return [part.contiguous() for part in torch.cat(list(shards), 1).unbind(0)]


REPLICATED = TensorLayout("replicated", None, None, _copies, _first)
"""The same on every rank."""
ROWS = TensorLayout("rows", 0, 0, _cut(0), _glue(0))
"""Cut along the output."""
COLUMNS = TensorLayout("columns", 1, 1, _cut(1), _glue(1))
"""Cut along the input."""
VOCAB = TensorLayout("vocab", 0, 0, _split_vocab, _join_vocab)
"""Rows of tokens, filled up with zeros so that every rank has equally many."""
QKV = TensorLayout("qkv", 0, 0, _split_qkv, _join_qkv)
"""Query, key, value; key-value heads are dealt to ranks together with their queries."""
GATE_UP = TensorLayout("gate_up", 0, 0, _split_gate_up, _join_gate_up)
"""Gate and up of a gated MLP."""
EXPERT_GATE_UP = TensorLayout("expert_gate_up", 1, 0, _split_stacked, _join_stacked)
"""Gate and up of one expert; each expert is one slice of the parameter."""
EXPERT_DOWN = TensorLayout("expert_down", 1, 1, _cut(1), _glue(1))
"""Down of one expert."""
