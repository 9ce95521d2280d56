"""A bucket as one block of bytes, packed as a whole or piece by piece."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.types import NamedTensor, WeightBucket
from miles_transports.packing import fill_pieces, layout_of, pieces, unpack

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64]


@st.composite
def buckets(draw: st.DrawFn) -> WeightBucket:
    """Of tensors of any size, empty ones and transposed ones among them."""
    tensors = []
    for index in range(draw(st.integers(0, 5))):
        rows, columns = draw(st.integers(0, 7)), draw(st.integers(1, 9))
        values = torch.randint(0, 200, (rows, columns)).to(draw(st.sampled_from(DTYPES)))
        tensors.append(NamedTensor(name=f"t{index}", tensor=values.T if draw(st.booleans()) else values))
    return WeightBucket(version=3, index=1, last=False, tensors=tuple(tensors))


@settings(max_examples=60, deadline=None)
@given(bucket=buckets(), piece_bytes=st.integers(1, 300))
def test_every_piece_is_final_when_it_is_said_to_be_and_all_are_the_bucket(
    bucket: WeightBucket, piece_bytes: int
) -> None:
    layout = layout_of(bucket)
    block = torch.zeros(layout.num_bytes + 5, dtype=torch.uint8)
    block[layout.num_bytes :] = 77
    done = 0
    parts = pieces(layout.num_bytes, piece_bytes)
    blocks = (block[begin:end] for begin, end in parts)
    for begin, end, filled in fill_pieces(bucket, layout, parts, blocks):
        assert filled.data_ptr() == block.data_ptr() + begin
        assert begin == done < end <= begin + piece_bytes
        done = end
        sent = block.clone()
        sent[end:] = 255  # what is not there yet
        for named, slot in zip(bucket.tensors, layout.slots, strict=True):
            whole = named.tensor.contiguous().reshape(-1).view(torch.uint8)
            there = max(0, min(len(whole), end - slot.offset))
            assert torch.equal(sent[slot.offset : slot.offset + there], whole[:there])
    assert done == layout.num_bytes
    assert torch.equal(block[layout.num_bytes :], torch.full((5,), 77, dtype=torch.uint8))
    for named, found in zip(bucket.tensors, unpack(block, layout).tensors, strict=True):
        assert (found.name, found.tensor.dtype) == (named.name, named.tensor.dtype)
        assert torch.equal(found.tensor, named.tensor)
