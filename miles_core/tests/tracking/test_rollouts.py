"""Rollout files: what was written comes back, and what is unknown stays unknown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from miles_core import batching
from miles_core.errors import DataError
from miles_core.tracking import rollouts
from miles_core.types import Boundary, Failure, Group, Message, Prompt, Status, TokenSpan, ToolCall, Trajectory

ROW = Trajectory(
    prompt_id="p1",
    session_id="s1",
    token_ids=np.array([5, 6, 7, 8], dtype=np.int32),
    sampled=np.array([False, True, True, True]),
    loss_mask=np.array([False, True, False, True]),
    logprobs=np.array([np.nan, -1.0, -2.0, 0.0], dtype=np.float32),
    spans=(TokenSpan(start=1, end=3, weight_version=4), TokenSpan(start=3, end=4, weight_version=5)),
    temperature=0.7,
    status=Status.TRUNCATED,
    reward=0.5,
    messages=(
        Message(role="user", content="Füge 2 und 2 zusammen"),
        Message(role="assistant", content="4", tool_calls=(ToolCall(id="c", name="add", arguments="{}"),)),
    ),
    metadata={"turns": 1},
)
FAILED = replace(
    ROW,
    session_id="s2",
    status=Status.FAILED,
    failure=Failure(boundary=Boundary.REWARD, message="timed out"),
    reward=None,
    loss_mask=np.zeros(4, dtype=np.bool_),
)


def write(folder: Path) -> None:
    groups = [
        Group(prompt=Prompt(id="p1", messages=()), trajectories=(FAILED, ROW)),
        Group(prompt=Prompt(id="p2", messages=()), trajectories=(replace(ROW, prompt_id="p2"),)),
    ]
    batch = batching.pack(groups)
    old = np.arange(8, dtype=np.float32) / -10
    rollouts.write(folder, 12, groups, batching.with_old_logprobs(batch, old))


def test_trajectories_come_back_with_their_trainer_log_probs(tmp_path: Path) -> None:
    write(tmp_path)
    assert rollouts.steps(tmp_path) == [12]
    failed, first, second = rollouts.read(tmp_path, 12)
    assert (first.step, first.group, first.sample, second.group, second.sample) == (12, 0, 1, 1, 2)
    assert first.token_ids.tolist() == [5, 6, 7, 8]
    assert first.versions.tolist() == [-1, 4, 4, 5]
    assert first.loss_mask.tolist() == [False, True, False, True]
    np.testing.assert_array_equal(first.logprobs, ROW.logprobs)
    np.testing.assert_allclose(first.old_logprobs, [np.nan, -0.1, np.nan, -0.3])
    np.testing.assert_allclose(second.old_logprobs, [np.nan, -0.5, np.nan, -0.7])  # its own part of the batch
    np.testing.assert_allclose(first.log_ratio, [np.nan, 0.9, np.nan, -0.3], rtol=1e-6)
    assert first.text == "4"
    assert first.messages[0]["content"] == "Füge 2 und 2 zusammen"
    assert first.messages[1]["tool_calls"] == [{"id": "c", "name": "add", "arguments": "{}"}]
    assert first.metadata == {"turns": 1}
    assert (first.status, first.reward, first.temperature) == ("truncated", 0.5, 0.7)
    assert (failed.status, failed.failure, failed.reward) == ("failed", "reward: timed out", None)
    assert np.isnan(failed.old_logprobs).all()


def test_a_step_that_was_not_written_names_those_that_were(tmp_path: Path) -> None:
    for step in (1, 2, 3, 7):
        (tmp_path / f"step_{step:06d}.parquet").touch()
    with pytest.raises(DataError, match="1-3, 7"):
        rollouts.read(tmp_path, 5)


def test_no_half_file_is_left(tmp_path: Path) -> None:
    write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000012.parquet"]


def test_a_cut_file_and_one_of_another_schema_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for cut in (whole[:100], b""):
        file.write_bytes(cut)
        with pytest.raises(DataError, match="cannot be read"):
            rollouts.read(tmp_path, 12)
    file.write_bytes(whole)
    pq.write_table(pq.read_table(file).drop(["versions"]), file)
    with pytest.raises(DataError, match="no column versions"):
        rollouts.read(tmp_path, 12)
