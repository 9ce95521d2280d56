"""A tensor of which this process holds one block, for checkpoints through torch.distributed.checkpoint.

A DTensor says the same with a mesh of process groups; a `Chunk` only says where the block lies, whatever arrangement of
ranks made it, and computes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Chunk(Tensor):
    """Block ``[offset, offset + block.shape)`` of a tensor of `shape`."""

    block: Tensor
    offset: torch.Size

    @staticmethod
    def __new__(cls, block: Tensor, shape: Sequence[int], offset: Sequence[int]) -> Chunk:
        made: Chunk = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=block.dtype, device=block.device)
        made.block, made.offset = block, torch.Size(offset)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"a checkpoint's chunk computes nothing, not {func}")

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        (chunk,) = self.__create_chunk_list__()
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(self.block), self.size())
        return [WriteItem(MetadataIndex(name, self.offset), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(self.offset, self.block.size())]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        if index.offset is not None and torch.Size(index.offset) != self.offset:
            raise ValueError(f"{index.fqn}: block {index.offset} is not here, {self.offset} is")
        return self.block
