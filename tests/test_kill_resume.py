"""kill -9 at a random instant, resume, and the metrics are those of the uninterrupted run, bit for bit."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .conftest import Workspace

STEPS = {"schedule.steps": 6}


def kill_after(workspace: Workspace, seconds: float, *arguments: str, step: int) -> bool:
    """Start a run, kill it after `seconds` of training or once `step` is done, and say whether it was still going."""
    events = workspace.directory() / "events.jsonl"
    before = len(events.read_text().splitlines()) if events.exists() else 0
    run = workspace.start(*arguments, overrides=STEPS)
    # Imports and start-up take longer than training; most of the kills must hit the training.
    while run.is_alive() and not (events.exists() and '"placed"' in "".join(lines_after(events, before))):
        time.sleep(0.01)
    deadline = time.monotonic() + seconds
    while run.is_alive() and time.monotonic() < deadline and steps_done(workspace) < step:
        time.sleep(0.002)
    going = run.is_alive()
    run.kill()
    run.join(timeout=30)
    return going


def lines_after(events: object, skip: int) -> list[str]:
    return events.read_text().splitlines()[skip:]  # type: ignore[attr-defined, no-any-return]


def steps_done(workspace: Workspace) -> int:
    metrics = workspace.directory() / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def check(workspace: Workspace, reference: bytes, rng: random.Random, kills: int) -> int:
    landed = 0
    started = False
    for _ in range(kills):
        # A fast machine trains all steps in a second: the first kills come half-way at the latest, whatever the clock.
        step = rng.randint(1, STEPS["schedule.steps"] // 2) if landed == 0 else STEPS["schedule.steps"]
        if kill_after(workspace, rng.uniform(0.0, 1.2), *(["--resume"] if started else []), step=step):
            landed += 1
        started = (workspace.directory() / "run.yaml").exists()
        if not started:
            continue
        done = workspace.lines()
        if done and done[-1]["step"] == STEPS["schedule.steps"]:
            break
    done_steps = workspace.lines()
    if not done_steps or done_steps[-1]["step"] < STEPS["schedule.steps"]:
        workspace.train("--resume", overrides=STEPS)
    assert (workspace.directory() / "metrics.jsonl").read_bytes() == reference
    return landed


@pytest.fixture(scope="module")
def reference(make_workspace_here: Callable[[], Workspace]) -> bytes:
    workspace = make_workspace_here()
    workspace.train(overrides=STEPS)
    return (workspace.directory() / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("seed", [0, 1])
def test_killed_runs_resume_to_the_same_metrics(workspace: Workspace, reference: bytes, seed: int) -> None:
    assert check(workspace, reference, random.Random(seed), kills=5) >= 1


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
    assert "no checkpoint of this run can be used" in done.stderr
    assert "--fresh" in done.stderr
    assert (workspace.directory() / "metrics.jsonl").read_bytes() == recorded
