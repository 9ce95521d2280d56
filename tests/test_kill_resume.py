"""kill -9 at a random instant, resume, and the metrics are those of the uninterrupted run, bit for bit."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .conftest import Workspace

STEPS = {"schedule.steps": 6}
CHANGES = 150
"""A run of so many steps changes more files than these, from its directory to its last line."""


def check(workspace: Workspace, reference: bytes, rng: random.Random, kills: int) -> None:
    """Kill the run, and what resumes it, before a random change to its files."""
    started = False
    for number in range(kills):
        resume = ["--resume"] if started else []
        code = workspace.struck(signal.SIGKILL, rng.randrange(CHANGES), *resume, overrides=STEPS)
        assert code == -signal.SIGKILL or (code == 0 and number > 0), f"exit {code}: do {CHANGES} changes still occur?"
        started = (workspace.directory() / "run.yaml").exists()
        if code == 0:
            break
    else:
        workspace.train(*(["--resume"] if started else []), overrides=STEPS)
    assert (workspace.directory() / "metrics.jsonl").read_bytes() == reference


@pytest.fixture(scope="module")
def reference(make_workspace_here: Callable[[], Workspace]) -> bytes:
    workspace = make_workspace_here()
    workspace.train(overrides=STEPS)
    return (workspace.directory() / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("seed", [0, 1])
def test_killed_runs_resume_to_the_same_metrics(workspace: Workspace, reference: bytes, seed: int) -> None:
    check(workspace, reference, random.Random(seed), kills=3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 30))
def test_killed_runs_resume_to_the_same_metrics_at_many_instants(
    workspace: Workspace, reference: bytes, seed: int
) -> None:
    check(workspace, reference, random.Random(seed), kills=8)


def test_a_truncated_newest_checkpoint_is_passed_over(workspace: Workspace, reference: bytes) -> None:
    workspace.train(overrides={"schedule.steps": 3})
    newest = workspace.directory() / "checkpoints" / "step_000003"
    victim = max((file for file in newest.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:100])
    workspace.train("--resume", overrides=STEPS)
    events = workspace.lines("events.jsonl")
    assert any(event["event"] == "resume" and event["step"] == 2 for event in events)
    assert any(event["event"] == "alarm" and "step_000003" in event["message"] for event in events)
    assert (workspace.directory() / "metrics.jsonl").read_bytes() == reference


def test_a_run_whose_every_checkpoint_is_damaged_is_not_begun_anew(workspace: Workspace) -> None:
    workspace.train(overrides={"schedule.steps": 2})
    recorded = (workspace.directory() / "metrics.jsonl").read_bytes()
    for manifest in workspace.directory().glob("checkpoints/*/manifest.json"):
        manifest.unlink()
    done = workspace.train("--resume", overrides=STEPS, code=1)
    assert done.stderr.startswith("error: no checkpoint of this run can be used")
    assert done.stderr.splitlines()[-1] == f"report: {workspace.directory()}/report.html"
    assert "--fresh" in done.stderr
    assert (workspace.directory() / "metrics.jsonl").read_bytes() == recorded
