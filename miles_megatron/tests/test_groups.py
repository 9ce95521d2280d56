"""Who takes Megatron's process groups down, and what is left of them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import miles_megatron.start  # noqa: F401
from miles_megatron import groups
from miles_megatron.groups import Layout

from . import scenarios
from .models import write_models

CPU = torch.device("cpu")


@pytest.fixture
def executors_group() -> Iterator[None]:
    """The default group, which an executor made and which outlives every backend."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


def threads() -> int:
    """Of this process. Those of gloo are there when a group is, but are given their names later."""
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.usefixtures("executors_group")
def test_the_last_user_takes_the_groups_down() -> None:
    """But for one group, which Megatron keeps until the next user."""
    from megatron.core import parallel_state  # its imports warn, unless miles_megatron.start came first

    before, kept = threads(), []
    for _ in range(2):
        groups.acquire(Layout(world=1), CPU)
        groups.acquire(Layout(world=1), CPU)
        assert threads() >= before + 10
        groups.release(Layout(world=1))
        dist.all_reduce(torch.ones(1), group=parallel_state.get_tensor_model_parallel_group())  # the other's still
        groups.release(Layout(world=1))
        kept.append(threads() - before)
    assert max(kept) <= 3
    assert dist.is_initialized()


@pytest.mark.usefixtures("executors_group")
def test_a_closed_backend_can_be_freed(tmp_path: Path) -> None:
    """Model and buffers hold one another, and the groups with their threads: the garbage collector must see it all."""
    (batch,) = scenarios.batches(1)
    backend = scenarios.Place(0, 1, write_models(tmp_path, "qwen3-moe"), "cpu").make("qwen3-moe")
    backend.train_step(batch)
    left = weakref.ref(backend._policy.models[0])
    backend.close()
    del backend
    gc.collect()
    assert left() is None
