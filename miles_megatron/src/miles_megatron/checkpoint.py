"""The trainer's state under the checkpoint's own names, so that any layout reads what any other wrote.

Each Megatron parameter's master weight and moments are taken apart into blocks of the checkpoint tensors that make it.
torch.distributed.checkpoint stores blocks (the torch_dist format) and cuts them anew when another layout asks.

    lm_head.weight.master, lm_head.weight.exp_avg, lm_head.weight.exp_avg_sq, …
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from miles_core.trainer import checkpoint
from miles_core.trainer.chunk import Chunk
from miles_megatron.optim import STATE, Optimizer
from miles_megatron.tables import Piece
from miles_megatron.weights import Held, WeightMap


def save(directory: Path, weights: WeightMap, optimizer: Optimizer) -> None:
    """Write the state of all ranks; a collective.

    Raises:
        CheckpointError: the disk is full or the folder cannot be written.
    """
    tensors, _ = _blocks(weights, optimizer)
    checkpoint.save(directory, tensors, updates=optimizer.updates, described=_described(weights))


def load(directory: Path, weights: WeightMap, optimizer: Optimizer) -> None:
    """Continue from what `save` wrote under any layout; a collective.

    Raises:
        CheckpointError: absent, half written, damaged, or of another model. Nothing was changed.
    """
    tensors, homes = _blocks(weights, optimizer)
    targets = {name: Chunk(torch.empty_like(c.block), c.shape, c.offset) for name, c in tensors.items()}
    updates = checkpoint.load(directory, targets, described=_described(weights))
    parameters: dict[int, Parameter] = {}
    filled: dict[tuple[int, str], Tensor] = {}
    for home in homes:
        whole = home.held.whole
        assert isinstance(whole, Parameter)
        parameters[id(whole)] = whole
        value = weights.unite(home.piece, home.held, [targets[name].block for name in home.names])
        if home.held.index is None:
            filled[(id(whole), home.kind)] = value
        else:
            stack = filled.setdefault((id(whole), home.kind), value.new_empty(whole.shape))
            stack[home.held.index] = value
    for (key, kind), value in filled.items():
        optimizer.set_state(parameters[key], kind, value)
    weights.refresh_copies()
    optimizer.restore(updates)


@dataclass(frozen=True, slots=True)
class _Home:
    """The blocks that make up one kind of state of one piece."""

    piece: Piece
    held: Held
    kind: str
    names: tuple[str, ...]


def _blocks(weights: WeightMap, optimizer: Optimizer) -> tuple[dict[str, Chunk], list[_Home]]:
    """This rank's blocks by name, and what they make up. A collective."""
    tensors: dict[str, Chunk] = {}
    homes: list[_Home] = []
    state: dict[str, Tensor] = {}
    of: Tensor | None = None
    for piece, held in weights.held.items():
        if held.copy or not isinstance(held.whole, Parameter):
            continue
        if held.whole is not of:  # experts of one parameter follow one another
            of, state = held.whole, optimizer.state_of(held.whole)
        for kind, value in state.items():
            names = tuple(f"{name}.{kind}" for name in weights.names(piece))
            homes.append(_Home(piece, held, kind, names))
            blocks = weights.divide(piece, held, value if held.index is None else value[held.index])
            for name, (block, shape, offset) in zip(names, blocks, strict=True):
                tensors[name] = Chunk(block.contiguous(), shape, offset)
    return tensors, homes


def _described(weights: WeightMap) -> dict[str, Tensor]:
    return {
        f"{name}.{kind}": torch.empty(meta.shape, dtype=torch.float32, device="meta")
        for name, meta in weights.trained.items()
        for kind in STATE
    }
