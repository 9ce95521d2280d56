"""Who takes Megatron's process groups down, and what is left of them."""

from __future__ import annotations

import contextlib
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


@pytest.mark.usefixtures("executors_group")
def test_the_last_user_takes_the_groups_down() -> None:
    """But for one group, which Megatron keeps until the next user.

    Groups are counted in torch's registry, which is what keeps them; when their threads end depends on the garbage
    collector.
    """
    from megatron.core import parallel_state  # its imports warn, unless miles_megatron.start came first

    known: dict[object, object] = dist.distributed_c10d._world.pg_map  # type: ignore[attr-defined]
    layout, before = Layout(world=1), len(known)
    for _ in range(2):
        groups.acquire(layout, CPU)
        with contextlib.ExitStack() as user:
            user.callback(groups.release, layout)
            assert len(known) >= before + 10
            groups.acquire(layout, CPU)
            groups.release(layout)
            dist.all_reduce(torch.ones(1), group=parallel_state.get_tensor_model_parallel_group())  # the first user's
        assert len(known) <= before + 1
    assert dist.is_initialized()


@pytest.mark.usefixtures("executors_group")
def test_a_closed_backend_can_be_freed(tmp_path: Path) -> None:
    """Model and buffers hold one another, and the groups with their threads: the garbage collector must see it all."""
    (batch,) = scenarios.batches(1)
    made = scenarios.Place(0, 1, write_models(tmp_path, "qwen3-moe"), "cpu").make("qwen3-moe")
    with contextlib.closing(made) as backend:
        backend.train_step(batch)
        left = weakref.ref(backend._policy.models[0])
    del backend, made
    gc.collect()
    assert left() is None
