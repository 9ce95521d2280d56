"""The bounded buffer: its kit, its size, and its order."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_core.errors import CheckpointError, ConfigError, PluginError
from miles_core.kinds.data_buffer import BufferContext, DataBuffer
from miles_core.options import BoundedBufferOptions
from miles_core.rollout import group_file
from miles_core.rollout.buffer import BoundedBuffer, GuardedBuffer
from miles_core.rollout.occupancy import Occupancy
from miles_core.testing.data_buffer import Bench, DataBufferConformance, finished_group
from miles_core.testing.filter import FAILED, example_group
from miles_core.types import Message, Prompt


class TestBounded(DataBufferConformance):
    capacity = 4

    def make(self, context: BufferContext) -> DataBuffer:
        return BoundedBuffer(BoundedBufferOptions(), context)

    async def test_first_in_first_out(self) -> None:
        bench = Bench(self)
        await bench.put(3, 1, 2)
        assert [(await bench.buffer.get()).number for _ in range(3)] == [3, 1, 2]


class TestSmall(DataBufferConformance):
    groups_per_step = 7
    capacity = 2

    def make(self, context: BufferContext) -> DataBuffer:
        return BoundedBuffer(BoundedBufferOptions(capacity_factor=0.3), context)


def test_a_buffer_without_room_for_a_group_is_refused() -> None:
    context = BufferContext(
        groups_per_step=2,
        max_weight_staleness=None,
        judge=lambda group: None,
        age=lambda group: None,
        reject=lambda finished, reason: None,
    )
    with pytest.raises(ConfigError, match="hold no group"):
        BoundedBuffer(BoundedBufferOptions(capacity_factor=0.4), context)


class Liar:
    """A buffer that answers every call with `answer`, or raises it."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def metrics(self) -> Any:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    async def get(self) -> Any:
        return self.metrics()

    async def put(self, finished: Any) -> Any:
        return self.metrics()


@pytest.mark.parametrize(
    ("call", "answer", "says"),
    [
        ("get", KeyError("x"), "data buffer Liar: get raised KeyError"),
        ("get", None, "gave out no group"),
        ("metrics", ValueError("x"), "metrics raised ValueError"),
        ("metrics", {"size": 1.0}, "does not say how full it is"),
        ("metrics", {"size": math.nan, "capacity": 2.0}, "does not say how full it is"),
        ("metrics", {"size": 1.0, "capacity": 0.0}, "does not say how full it is"),
    ],
)
async def test_a_broken_buffer_is_named(call: str, answer: Any, says: str) -> None:
    guarded = GuardedBuffer(Liar(answer))
    with pytest.raises(PluginError, match=says):
        await guarded.get() if call == "get" else guarded.metrics()


async def test_what_a_filter_raises_in_put_keeps_its_own_name() -> None:
    buffer = Liar(PluginError("filter 'zero' raised ZeroDivisionError"))
    with pytest.raises(PluginError, match=r"^filter 'zero' raised"):
        await GuardedBuffer(buffer).put(finished_group(0, version=0))


def test_groups_on_disk_are_what_they_were(tmp_path: Path) -> None:
    groups = [finished_group(4, version=12, size=3), finished_group(9, version=-1)]
    failed = example_group(0.5, FAILED)
    groups.append(type(groups[0])(number=11, group=failed))
    group_file.write(tmp_path / "groups", groups)
    prompts = {finished.group.prompt.id: finished.group.prompt for finished in groups}
    found = group_file.read(tmp_path / "groups", prompts.__getitem__)
    assert [finished.number for finished in found] == [4, 9, 11]
    for before, after in zip(groups, found, strict=True):
        assert after.group.prompt is before.group.prompt
        for row, again in zip(before.group.trajectories, after.group.trajectories, strict=True):
            for name in ("token_ids", "sampled", "loss_mask", "logprobs"):
                np.testing.assert_array_equal(getattr(row, name), getattr(again, name))
                assert getattr(row, name).dtype == getattr(again, name).dtype
            for name in ("prompt_id", "session_id", "spans", "temperature", "reward", "status", "failure", "messages"):
                assert getattr(row, name) == getattr(again, name), name
            assert dict(row.metadata) == dict(again.metadata)
            again.check()


def test_branches_of_a_session_come_back_with_their_row(tmp_path: Path) -> None:
    finished = finished_group(3, size=3)
    first, second, third = finished.group.trajectories
    tree = replace(first, branches=(second, replace(third, branches=(second,))))
    group = replace(finished.group, trajectories=(tree,))
    group_file.write(tmp_path, [type(finished)(number=3, group=group)])
    (found,) = group_file.read(tmp_path, lambda _: finished.group.prompt)
    (again,) = found.group.trajectories
    assert [len(row.branches) for row in (again, *again.branches)] == [2, 0, 1]
    np.testing.assert_array_equal(again.branches[1].logprobs, third.logprobs)
    np.testing.assert_array_equal(again.branches[1].branches[0].token_ids, second.token_ids)


def test_every_field_of_a_trajectory_is_written() -> None:
    from dataclasses import fields

    from miles_core.types import Trajectory

    named = {*group_file.ARRAYS, *group_file.PLAIN, *group_file.SPECIAL}
    assert named == {field.name for field in fields(Trajectory)}


def test_damaged_groups_are_refused(tmp_path: Path) -> None:
    group_file.write(tmp_path, [finished_group(0)])
    (tmp_path / "groups.npz").write_bytes(b"half")
    with pytest.raises(CheckpointError, match="groups that can be read"):
        group_file.read(tmp_path, lambda _: Prompt(id="p", messages=(Message(role="user"),)))


def test_occupancy_is_the_mean_over_time_not_over_changes() -> None:
    now = [0.0]
    level = Occupancy(lambda: now[0])
    level.set(4)
    now[0] = 3.0
    level.set(0)
    now[0] = 4.0
    assert level.mean() == 3.0
    assert level.mean() == 0.0
    level.set(2)
    now[0] = 5.0
    assert level.mean() == 2.0
    assert level.highest == 4
