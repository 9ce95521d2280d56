"""Between a checkpoint's tensors and this rank's parameters: loading, and export in buckets.

Every rank knows from the folder's headers which tensors exist and from the table which parameter each belongs to. What
a rank holds of them it finds in its own modules; ranks tell each other once, so that an export knows where to gather.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor
from torch.nn import Parameter

from miles_core.errors import ConfigError
from miles_core.types import NamedTensor, WeightBucket
from miles_core.weights.buckets import plan_buckets
from miles_megatron.checkpoint_folder import ModelFolder
from miles_megatron.layouts import Heads
from miles_megatron.tables import Piece, Table


@dataclass(frozen=True, slots=True)
class Held:
    """A piece that this rank holds a shard of."""

    whole: Tensor
    """The parameter or buffer. Megatron moves its data into buffers of its own, so views are made when needed."""
    group: Any
    """Ranks that hold the other shards."""
    index: int | None = None
    """The expert's slice of it."""
    copy: bool = False
    """A second home of a tied tensor: loaded, never exported."""

    @property
    def tensor(self) -> Tensor:
        data = self.whole.detach()
        return data if self.index is None else data[self.index]


class WeightMap:
    """Which pieces of the checkpoint are where."""

    def __init__(self, folder: ModelFolder, table: Table, models: Sequence[Any], heads: Heads, *, tied: bool) -> None:
        """A collective.

        Raises:
            ConfigError: the folder lacks a tensor, has one that no row names, or leaves a parameter unfilled.
        """
        self._folder, self._table, self._heads, self._tied = folder, table, heads, tied
        self.tensors: dict[str, Tensor] = {}
        """Shape and dtype of what is exported, by name, on the meta device, in the folder's order."""
        self._piece_of: dict[str, Piece] = {}
        self._read_names(tied)
        self.held = _held_pieces(models, table, set(self._piece_of.values()), folder, tied=tied)
        self._mark_shards()
        mine = [piece for piece, held in self.held.items() if not held.copy]
        everyone: list[list[Piece]] = [mine]
        if dist.get_world_size() > 1:
            everyone = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(everyone, mine)
        self._holders: dict[Piece, list[int]] = {}
        for rank, pieces in enumerate(everyone):
            for piece in pieces:
                self._holders.setdefault(piece, []).append(rank)
        homeless = sorted(set(self._piece_of.values()) - self._holders.keys())
        if homeless:
            names = [name for piece in homeless for name in table.tensors(piece)]
            raise _mismatch(folder, f"no parameter for {', '.join(names[:3])} ({len(names)} tensors)")

    def _mark_shards(self) -> None:
        """Megatron counts a parameter in the gradient's norm on every rank only if it is marked as cut.

        It sets the mark while it initialises weights, which is switched off here.
        """
        for piece, held in self.held.items():
            axis = self._table.rows[piece.row].layout.axis
            if axis is not None and held.index is None and isinstance(held.whole, Parameter):
                _unmark(held.whole)
                set_tensor_model_parallel_attributes(held.whole, is_parallel=True, dim=axis, stride=1)

    def _read_names(self, tied: bool) -> None:
        unknown = []
        for name, meta in self._folder.tensors.items():
            if self._table.leaves_out(name) or self._beyond(name):
                continue
            if tied and name == "lm_head.weight":
                continue
            piece = self._table.find(name)
            if piece is None:
                unknown.append(name)
                continue
            self.tensors[name] = meta
            self._piece_of[name] = piece
        if unknown:
            raise _mismatch(self._folder, f"no row for {', '.join(unknown[:3])} ({len(unknown)} tensors)")
        for piece in sorted(set(self._piece_of.values())):
            missing = [name for name in self._table.tensors(piece) if name not in self.tensors]
            if missing:
                raise _mismatch(self._folder, f"{missing[0]} is missing, while {self._table.tensors(piece)[0]} exists")

    def _beyond(self, name: str) -> bool:
        """Whether it belongs to a layer after the last one, which serves multi-token prediction."""
        if not self._table.architecture.left_out:
            return False
        piece = self._table.find(name)
        return piece is not None and piece.layer is not None and piece.layer >= self._folder.config.num_hidden_layers

    # --- loading ------------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Fill this rank's parameters from the folder."""
        with torch.no_grad(), self._folder.reader() as read:
            for piece, held in self.held.items():
                row = self._table.rows[piece.row]
                tensors = [read(name) for name in self._table.tensors(piece)]
                shard = row.layout.split(tensors, held.group.size(), self._heads)[held.group.rank()]
                if shard.shape != held.tensor.shape:
                    names = ", ".join(self._table.tensors(piece))
                    raise _mismatch(self._folder, f"{names}: {tuple(shard.shape)} for {tuple(held.tensor.shape)}")
                held.tensor.copy_(shard)

    def refresh_copies(self) -> None:
        """Give second homes of tied tensors the first one's values, after a resume. A collective where some are."""
        tied = [held for held in self.held.values() if held.copy]
        if self._tied and parallel_state.get_pipeline_model_parallel_world_size() > 1:
            first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
            if first or tied:
                (held,) = tied or [h for p, h in self.held.items() if p == _embedding(self._table)]
                value = held.tensor.clone() if first else torch.zeros_like(held.tensor)
                dist.all_reduce(value, group=parallel_state.get_embedding_group())
                held.tensor.copy_(value)

    # --- blocks -------------------------------------------------------------------------------------------------------

    @property
    def trained(self) -> dict[str, Tensor]:
        """Those of `tensors` that have a gradient."""
        return {n: meta for n, meta in self.tensors.items() if self._table.rows[self._piece_of[n].row].trained}

    def names(self, piece: Piece) -> tuple[str, ...]:
        return self._table.tensors(piece)

    def divide(self, piece: Piece, held: Held, shard: Tensor) -> list[tuple[Tensor, torch.Size, tuple[int, ...]]]:
        """A shard as blocks of the checkpoint's tensors: each with the tensor's shape and where the block begins."""
        layout = self._table.rows[piece.row].layout
        shards, rank = held.group.size(), held.group.rank()
        blocks = layout.join([shard], self._heads if layout.axis is None else self._heads.of_shard(shards, rank))
        found = []
        for name, block in zip(self.names(piece), blocks, strict=True):
            shape = self._folder.tensors[name].shape
            offset = [0] * len(shape)
            if layout.tensor_axis is not None and shards > 1:
                offset[layout.tensor_axis] = rank * -(-shape[layout.tensor_axis] // shards)
            found.append((block, shape, tuple(offset)))
        return found

    def unite(self, piece: Piece, held: Held, blocks: Sequence[Tensor]) -> Tensor:
        """Undo `divide`."""
        layout = self._table.rows[piece.row].layout
        shards, rank = held.group.size(), held.group.rank()
        heads = self._heads if layout.axis is None else self._heads.of_shard(shards, rank)
        (shard,) = layout.split(blocks, 1, heads)
        missing = held.tensor.shape[0] - shard.shape[0] if layout.name == "vocab" else 0
        return torch.cat([shard, shard.new_zeros(missing, *shard.shape[1:])]) if missing else shard

    # --- export -------------------------------------------------------------------------------------------------------

    def described(self, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Shape and dtype of every exported tensor, on the meta device; `dtype` replaces floating-point ones."""
        if dtype is None:
            return dict(self.tensors)
        return {name: meta.to(dtype) for name, meta in self.tensors.items()}

    def buckets(self, *, version: int, bucket_bytes: int, dtype: torch.dtype | None) -> Iterator[WeightBucket]:
        """Every tensor once, as a copy, complete on every rank. A collective."""
        described = self.described(dtype)
        sizes = {name: meta.numel() * meta.element_size() for name, meta in described.items()}
        plan = plan_buckets(sizes, bucket_bytes)
        for index, names in enumerate(plan):
            whole = self._collect(names, described)
            tensors = tuple(NamedTensor(name=name, tensor=whole[name]) for name in names)
            yield WeightBucket(version=version, index=index, last=index == len(plan) - 1, tensors=tensors)

    def _collect(self, names: Sequence[str], described: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather shards where they are held, then send what some rank lacks from one that has it."""
        pieces = list(dict.fromkeys(self._piece_of[name] for name in names))
        found: dict[str, Tensor] = {}
        for piece in pieces:
            if piece in self.held and not self.held[piece].copy:
                for name, tensor in zip(self._table.tensors(piece), self._gather(piece), strict=True):
                    found[name] = tensor.to(described[name].dtype, copy=True).contiguous()
        world = dist.get_world_size()
        away: dict[int, list[str]] = {}
        for piece in pieces:
            holders = self._holders[piece]
            if len(holders) < world:
                away.setdefault(holders[0], []).extend(self._table.tensors(piece))
        for root, moved in sorted(away.items()):
            _send(root, moved, found, described)
        return found

    @torch.no_grad()
    def _gather(self, piece: Piece) -> list[Tensor]:
        held, row = self.held[piece], self._table.rows[piece.row]
        shards = [held.tensor]
        if held.group.size() > 1 and row.layout.axis is not None:
            mine = shards[0].contiguous()
            shards = [torch.empty_like(mine) for _ in range(held.group.size())]
            dist.all_gather(shards, mine, group=held.group)
        return row.layout.join(shards, self._heads)


def _send(root: int, names: Sequence[str], found: dict[str, Tensor], described: Mapping[str, Tensor]) -> None:
    """Broadcast the bytes of some tensors in one message; afterwards every rank has them."""
    here = dist.get_rank() == root
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    sizes = [described[name].numel() * described[name].element_size() for name in names]
    if here:
        flat = torch.cat([found[name].reshape(-1).view(torch.uint8) for name in names])
    else:
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    dist.broadcast(flat, src=root)
    if here:
        return
    parts = torch.split(flat, sizes)
    for name, part in zip(names, parts, strict=True):
        meta = described[name]
        # A copy of its own: parts of one buffer may start at addresses that the dtype cannot have.
        found[name] = part.clone().view(meta.dtype).view(meta.shape)


def _held_pieces(
    models: Sequence[Any], table: Table, pieces: set[Piece], folder: ModelFolder, *, tied: bool
) -> dict[Piece, Held]:
    """The pieces whose parameters live in this rank's models.

    Raises:
        ConfigError: a parameter is made of nothing.
    """
    held: dict[Piece, Held] = {}
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    expert_group = parallel_state.get_expert_tensor_parallel_group()
    for model in models:
        experts = {f"{name}.": module for name, module in model.named_modules() if hasattr(module, "expert_group")}
        for local_name, tensor in (*model.named_parameters(), *_persistent_buffers(model)):
            name = global_name(model, local_name)
            filled = 0
            for row, layer in table.rows_of(name):
                if table.rows[row].routed:
                    owner = next(module for prefix, module in experts.items() if local_name.startswith(prefix))
                    first = owner.expert_group.rank() * tensor.shape[0]
                    for index in range(tensor.shape[0]):
                        piece = Piece(row, layer, first + index)
                        if piece in pieces:
                            held[piece] = Held(tensor, expert_group, index)
                            filled += 1
                    filled = int(filled == tensor.shape[0])
                elif Piece(row, layer, None) in pieces:
                    held[Piece(row, layer, None)] = Held(tensor, tensor_group)
                    filled = 1
            if not filled and tied and local_name == "output_layer.weight":
                held[_embedding(table)] = Held(tensor, tensor_group, copy=True)
                filled = 1
            if not filled:
                raise _mismatch(folder, f"nothing to fill {name} with")
    return held


def _embedding(table: Table) -> Piece:
    ((row, _),) = table.rows_of("embedding.word_embeddings.weight")
    return Piece(row, None, None)


def _unmark(parameter: Parameter) -> None:
    """Megatron refuses to mark twice."""
    for mark in ("tensor_model_parallel", "partition_dim", "partition_stride"):
        if hasattr(parameter, mark):
            delattr(parameter, mark)


def _persistent_buffers(model: Any) -> Iterator[tuple[str, Tensor]]:
    kept = set(model.state_dict().keys())
    for name, buffer in model.named_buffers():
        if name in kept:
            yield name, buffer


def global_name(model: Any, name: str) -> str:
    """Name of a parameter with its layer counted over the whole model."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(model.decoder.layers[int(parts[2])].layer_number - 1)
    return ".".join(parts)


def _mismatch(folder: ModelFolder, found: str) -> ConfigError:
    return ConfigError(
        "the checkpoint does not fit its architecture's table",
        expected="each tensor in one row, each parameter filled",
        found=found,
        where=str(folder.path),
        do="check that the folder is complete and unmodified, or use backend fsdp",
    )
