"""Layouts undo themselves bit for bit for any number of shards, and each shard holds a block of each tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import miles_megatron.start  # noqa: F401
from miles_megatron import layouts
from miles_megatron.layouts import Heads, TensorLayout

SHARDS = st.sampled_from([1, 2, 4])


def tensors_of(layout: TensorLayout, heads: Heads, width: int) -> list[torch.Tensor]:
    """The checkpoint's tensors that one parameter of this layout is made of."""
    shapes: dict[str, list[tuple[int, ...]]] = {
        "replicated": [(5,)],
        "rows": [(4 * width, 3)],
        "columns": [(3, 4 * width)],
        "vocab": [(heads.vocab, 3)],
        "qkv": [(heads.query * width, 3), (heads.key_value * width, 3), (heads.key_value * width, 3)],
        "gate_up": [(4 * width, 3), (4 * width, 3)],
        "expert_gate_up": [(4 * width, 3), (4 * width, 3)],
        "expert_down": [(3, 4 * width)],
    }
    return [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes[layout.name]]


ALL = [value for value in vars(layouts).values() if isinstance(value, TensorLayout)]


@pytest.mark.parametrize("layout", ALL, ids=lambda layout: layout.name)
@given(shards=SHARDS, groups=st.sampled_from([4, 8]), each=st.integers(1, 3), vocab=st.integers(4, 13), data=st.data())
@settings(max_examples=25, deadline=None)
def test_join_undoes_split(layout: TensorLayout, shards: int, groups: int, each: int, vocab: int, data: Any) -> None:
    heads = Heads(groups * each, groups, vocab)
    tensors = tensors_of(layout, heads, data.draw(st.integers(1, 3)))
    parts = layout.split(tensors, shards, heads)
    assert len({part.shape for part in parts}) == 1
    back = layout.join(parts, heads)
    assert all(torch.equal(a, b) for a, b in zip(back, tensors, strict=True))


@pytest.mark.parametrize("layout", [each for each in ALL if each.axis is not None], ids=lambda layout: layout.name)
@given(shards=SHARDS, vocab=st.integers(4, 13))
@settings(max_examples=25, deadline=None)
def test_a_shard_holds_the_chunk_of_each_tensor(layout: TensorLayout, shards: int, vocab: int) -> None:
    heads = Heads(8, 4, vocab)
    tensors = tensors_of(layout, heads, 2)
    assert layout.tensor_axis is not None
    for rank, part in enumerate(layout.split(tensors, shards, heads)):
        blocks = layout.join([part], heads.of_shard(shards, rank))
        for block, tensor in zip(blocks, tensors, strict=True):
            chunks = tensor.chunk(shards, layout.tensor_axis)
            expected = chunks[rank] if rank < len(chunks) else tensor[:0]
            assert torch.equal(block, expected)


def test_query_heads_stay_with_their_key_value_head() -> None:
    heads = Heads(4, 2, 8)
    query, key, value = (torch.arange(n).float()[:, None] + base for n, base in ((4, 0), (2, 10), (2, 20)))
    first, second = layouts.QKV.split([query, key, value], 2, heads)
    assert first[:, 0].tolist() == [0, 1, 10, 20]
    assert second[:, 0].tolist() == [2, 3, 11, 21]
