"""Whole runs whose sampling and training overlap: exact where they promise it, and nothing lost or trained twice."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

from miles_core.rollout.ledger import Fate
from miles_core.tracking import rollouts
from miles_core.tracking.names import is_clock, undeclared

if TYPE_CHECKING:
    from .conftest import Workspace

SEPARATE = {"placement.mode": "separate", "corrections": ["tis"]}
ONE_STEP_OFF = {**SEPARATE, "schedule.mode": "one-step-off", "schedule.steps": 5}
FULLY_ASYNC = {**SEPARATE, "schedule.mode": "fully-async", "schedule.steps": 6, "schedule.max_concurrent_samples": 9}


def struck_at(
    workspace: Workspace, lines: int, number: signal.Signals, *arguments: str, overrides: dict[str, Any]
) -> int | None:
    """Train until so many more lines of metrics stand, and be struck. Each line opens the file twice: to see that the
    one before is whole, and to be appended."""
    return workspace.struck(number, 2 * lines, *arguments, name="/metrics.jsonl", overrides=overrides)


def trained_sessions(workspace: Workspace) -> list[str]:
    folder = workspace.directory() / "rollouts"
    return [row.session_id for step in rollouts.steps(folder) for row in rollouts.read(folder, step)]


def check_books(counts: dict[str, Any]) -> None:
    assert counts["submitted"] == sum(counts[fate.value] for fate in Fate)
    assert counts["submitted"] == counts["drawn"] + counts["resubmitted"]


def test_one_step_off_is_one_version_old_and_resumes_bit_for_bit(workspace: Workspace) -> None:
    workspace.train(overrides=ONE_STEP_OFF)
    reference = (workspace.directory() / "metrics.jsonl").read_bytes()
    lines = workspace.lines()
    assert [line["contract/versions/s_old_max"] for line in lines[1:]] == [0, 1, 1, 1, 1]
    assert [line["contract/versions/delta_gen_max"] for line in lines[1:]] == [0] * 5
    workspace.directory().rename(workspace.directory("reference"))
    assert struck_at(workspace, 3, signal.SIGKILL, overrides=ONE_STEP_OFF) == -signal.SIGKILL
    workspace.train("--resume", overrides=ONE_STEP_OFF)
    assert (workspace.directory() / "metrics.jsonl").read_bytes() == reference


def test_fully_async_trains_whole_groups_once_and_ages_them_in_versions_not_steps(workspace: Workspace) -> None:
    overrides = {**FULLY_ASYNC, "schedule.max_weight_staleness": 1, "schedule.unused_groups": "retry"}
    overrides |= {"schedule.update_weights_interval": 2, "schedule.on_weight_update": "in-place"}
    workspace.train(overrides=overrides)
    lines, timings = workspace.lines(), workspace.lines("timings.jsonl")
    assert [line["step"] for line in lines] == list(range(7))
    assert max(line["contract/versions/s_old_max"] for line in lines[1:]) <= 1
    for timing in timings[1:]:
        per_step = timing["tokens/sampled"] / timing["time/step_s"]
        assert timing["throughput/rollout_tokens_per_s"] == pytest.approx(per_step)
    published = [(e["version"], e["step"]) for e in workspace.lines("events.jsonl") if e["event"] == "publish"]
    assert published == [(0, 0), (1, 2), (2, 4), (3, 6)]
    assert [line["contract/versions/current"] for line in lines[1:]] == [0, 0, 1, 1, 2, 2]
    assert undeclared(key for line in (*lines, *timings) for key in line) == []
    assert not any(is_clock(key) for line in lines for key in line)
    for line in lines[1:]:
        counts = {name.removeprefix("async/"): value for name, value in line.items() if name.startswith("async/")}
        check_books(counts)
    (last,) = [event for event in workspace.lines("events.jsonl") if event["event"] == "ledger"]
    check_books(last)
    assert last["trained"] == 12
    sessions = trained_sessions(workspace)
    assert len(sessions) == len(set(sessions)) == 36


def test_an_interrupted_fully_async_run_keeps_what_it_had_and_trains_nothing_twice(workspace: Workspace) -> None:
    overrides = {**FULLY_ASYNC, "schedule.steps": 8}
    assert struck_at(workspace, 3, signal.SIGINT, overrides=overrides) == 130
    done = workspace.lines()[-1]["step"]
    saved = sorted(path.name for path in (workspace.directory() / "checkpoints").iterdir())[-1]
    assert saved == f"step_{done:06d}"
    (first,) = [event for event in workspace.lines("events.jsonl") if event["event"] == "ledger"]
    check_books(first)
    assert struck_at(workspace, 2, signal.SIGKILL, "--resume", overrides=overrides) == -signal.SIGKILL
    workspace.train("--resume", overrides=overrides)
    events = workspace.lines("events.jsonl")
    last = next(event for event in reversed(events) if event["event"] == "ledger")
    check_books(last)
    assert last["trained"] == 16
    assert last["put_back"] >= last["resubmitted"]  # what was put back last may wait still
    versions = [line["contract/versions/current"] for line in workspace.lines()[1:]]
    assert versions == list(range(8))
    sessions = trained_sessions(workspace)
    assert len(sessions) == len(set(sessions)) == 48
