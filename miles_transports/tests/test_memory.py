"""Memory that receivers use again: never while somebody looks at it, and bounded."""

from __future__ import annotations

import torch

from miles_transports.memory import HUGE_PAGE_BYTES, Recycled, fresh

CPU = torch.device("cpu")


def test_a_block_is_used_again_only_when_no_view_of_it_is_left() -> None:
    memory = Recycled()
    first = memory.take(64, CPU)
    place, view = first.data_ptr(), first[16:32].view(torch.bfloat16)
    view.fill_(3.0)
    del first
    other = memory.take(64, CPU)
    assert other.data_ptr() != place
    other.zero_()
    assert view.tolist() == [3.0] * 8
    del view
    assert memory.take(60, CPU).data_ptr() == place


def test_blocks_of_other_sizes_replace_what_is_free() -> None:
    memory = Recycled()
    for size in (10, 100, 1000, 100, 10):
        memory.take(size, CPU).fill_(1)
        assert len(memory._free) == 1
    kept = [memory.take(10, CPU) for _ in range(3)]
    assert len({tensor.data_ptr() for tensor in kept}) == 3


def test_an_empty_block_and_huge_pages_are_memory_like_any_other() -> None:
    assert Recycled().take(0, CPU).numel() == 0
    large = fresh(HUGE_PAGE_BYTES + 5)
    assert large.flags.writeable
    large[-1] = 7
    assert int(large.sum(dtype="int64")) == 7
