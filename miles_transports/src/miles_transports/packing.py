"""A bucket as one block of bytes and a line of text that says what lies where.

One collective per bucket instead of one per tensor, and no restriction to the dtypes a communication library knows.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from miles_core.types import NamedTensor, WeightBucket

ALIGNMENT_BYTES = 16
"""A view of bytes as a dtype must start at a multiple of its item size; complex128 has the largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where one tensor lies in the block."""

    name: str
    dtype: str
    """Attribute of torch: ``bfloat16``."""
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Everything about a bucket except its bytes."""

    version: int
    index: int
    last: bool
    num_bytes: int
    slots: tuple[Slot, ...]

    def to_json(self) -> str:
        slots = [[slot.name, slot.dtype, slot.shape, slot.offset] for slot in self.slots]
        return json.dumps([self.version, self.index, self.last, self.num_bytes, slots])

    @staticmethod
    def from_json(text: str) -> Layout:
        version, index, last, num_bytes, slots = json.loads(text)
        return Layout(
            version=version,
            index=index,
            last=last,
            num_bytes=num_bytes,
            slots=tuple(Slot(name=n, dtype=d, shape=tuple(s), offset=o) for n, d, s, o in slots),
        )


def layout_of(bucket: WeightBucket) -> Layout:
    """Place the bucket's tensors one after the other, each at a multiple of `ALIGNMENT_BYTES`."""
    slots: list[Slot] = []
    end = 0
    for named in bucket.tensors:
        tensor = named.tensor
        dtype = str(tensor.dtype).removeprefix("torch.")
        slots.append(Slot(name=named.name, dtype=dtype, shape=tuple(tensor.shape), offset=end))
        end += math.ceil(tensor.numel() * tensor.element_size() / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return Layout(version=bucket.version, index=bucket.index, last=bucket.last, num_bytes=end, slots=tuple(slots))


def pack(bucket: WeightBucket, layout: Layout, device: torch.device) -> torch.Tensor:
    """uint8[num_bytes] on `device`: a copy of every tensor in row-major order."""
    block = torch.empty(layout.num_bytes, dtype=torch.uint8, device=device)
    fill(block, bucket, layout)
    return block


def fill(block: torch.Tensor, bucket: WeightBucket, layout: Layout) -> None:
    """Copy every tensor to its place in uint8[>= num_bytes]."""
    for _ in fill_pieces(bucket, layout, [(0, layout.num_bytes)], iter([block])):
        pass


def pieces(num_bytes: int, piece_bytes: int) -> list[tuple[int, int]]:
    """Begin and end of consecutive pieces of a block, none empty."""
    return [(begin, min(begin + piece_bytes, num_bytes)) for begin in range(0, num_bytes, piece_bytes)]


def fill_pieces(
    bucket: WeightBucket, layout: Layout, parts: Iterable[tuple[int, int]], blocks: Iterator[torch.Tensor]
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """`fill`, piece by piece: yields each of `parts`, which follow one another, with the block its bytes were put into.

    Args:
        blocks: uint8[>= size of the part], one for each part, asked for when its turn has come.
    """
    rest = deque((slot.offset, each.tensor) for each, slot in zip(bucket.tensors, layout.slots, strict=True))
    for begin, end in parts:
        block = next(blocks)
        while rest and rest[0][0] < end:
            offset, tensor = rest.popleft()
            values = tensor.detach().contiguous().reshape(-1).view(torch.uint8)  # one at a time: this may copy it
            fits = values[: end - offset]
            block[offset - begin : offset - begin + len(fits)].copy_(fits)
            if len(fits) < len(values):
                rest.appendleft((end, values[len(fits) :]))
        yield begin, end, block


def unpack(block: torch.Tensor, layout: Layout) -> WeightBucket:
    """The bucket whose tensors are views of `block`."""
    tensors: list[NamedTensor] = []
    for slot in layout.slots:
        dtype = getattr(torch, slot.dtype)
        num_bytes = math.prod(slot.shape) * dtype.itemsize
        values = block[slot.offset : slot.offset + num_bytes].view(dtype).view(slot.shape)
        tensors.append(NamedTensor(name=slot.name, tensor=values))
    return WeightBucket(version=layout.version, index=layout.index, last=layout.last, tensors=tuple(tensors))
