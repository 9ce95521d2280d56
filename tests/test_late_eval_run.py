"""Whole runs that evaluate beside training: the score of a step measures that step's weights, whenever it comes."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from miles_core.report.html import summary
from miles_core.report.load import load_run
from miles_core.testing.preloaded import environment
from miles_core.testing.waiting import wait_until
from miles_core.tracking.names import is_clock, undeclared

if TYPE_CHECKING:
    from .conftest import Workspace

DEDICATED = {"placement.mode": "separate", "eval.on": "dedicated", "eval.engines": 2}
SHORT = {"schedule.steps": 2, "eval.every_steps": 1}
GRADER = """
import json
def grade(folder, facts):
    if facts["step"] == 2:
        raise ValueError("no idea")
    marker = json.loads((folder / "SNAPSHOT.json").read_text())
    return {"reward": len(facts["prompts"]), "step": marker["step"], "tokens": facts["sampling"]["max_tokens"]}
"""


PATIENT = """
import time
from pathlib import Path
def grade(folder, facts):
    while not (Path(__file__).parent / "go").exists():
        time.sleep(0.05)
    return facts["step"]
"""


def figures(line: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in line.items() if k.startswith("eval/") and not is_clock(k)}


def test_a_dedicated_fleet_measures_what_shared_engines_measure_and_the_steps_are_the_same(
    workspace: Workspace,
) -> None:
    workspace.train(overrides={**SHORT, "name": "shared", "placement.mode": "separate"})
    workspace.train(overrides={**SHORT, **DEDICATED})
    steps, evals = workspace.lines(), workspace.lines("evals.jsonl")
    shared = {line["step"]: line for line in workspace.lines(name="shared")}
    assert [line["step"] for line in steps] == [1, 2]
    assert [line["step"] for line in evals] == [0, 1, 2]
    for line in evals:
        assert figures(line) == figures(shared[line["step"]])
        assert line["eval/latency_s"] > 0
    assert len({line["eval/response_tokens_mean"] + line["eval/reward_mean"] for line in evals}) > 1
    for line in steps:
        theirs = {k: v for k, v in shared[line["step"]].items() if not k.startswith("eval/")}
        # Not bit for bit: engines that evaluate keep prefixes in their cache, and what is reused is rounded otherwise.
        assert line == pytest.approx(theirs, rel=1e-3, abs=1e-4)
    assert evals[-1]["eval/lag_steps"] == 0
    assert undeclared(key for line in evals for key in line) == []
    assert list((workspace.directory() / "snapshots").iterdir()) == []
    run = load_run(workspace.directory())
    assert [step for step, _ in run.series("eval/reward_mean")] == [0, 1, 2]


@pytest.mark.slow
def test_a_function_of_the_users_gets_the_snapshot_and_its_failure_is_a_counted_skip(workspace: Workspace) -> None:
    (workspace.folder / "grader.py").write_text(GRADER)
    workspace.train(
        overrides={
            "placement.mode": "separate",
            "schedule.mode": "fully-async",
            "corrections": ["tis"],
            "eval.on": "external",
            "eval.function": f"{workspace.folder}/grader.py:grade",
        }
    )
    zero, two, four = workspace.lines("evals.jsonl")
    assert (zero["eval/reward_mean"], zero["eval/reward/step"], zero["eval/reward/tokens"]) == (2.0, 0.0, 4.0)
    assert two == {"step": 2, "eval/skipped/raised": 1.0}
    assert (four["step"], four["eval/reward/step"]) == (4, 4.0)
    (alarm,) = [e for e in workspace.lines("events.jsonl") if e["event"] == "alarm" and "skipped" in e["message"]]
    assert "no idea" in alarm["message"]
    assert any("Evaluations skipped: 1 (raised 1)" in sentence for sentence in summary(load_run(workspace.directory())))


@pytest.mark.slow
def test_a_killed_run_takes_up_the_evaluations_that_were_open(workspace: Workspace) -> None:
    (workspace.folder / "grader.py").write_text(PATIENT)
    overrides = {
        "placement.mode": "separate",
        "eval.on": "external",
        "eval.function": f"{workspace.folder}/grader.py:grade",
        "eval.max_in_flight": 3,
    }
    snapshots = workspace.directory() / "snapshots"
    with subprocess.Popen(workspace.command(overrides=overrides), env=environment()) as run:
        wait_until(lambda: [line["step"] for line in workspace.lines()][-1:] == [4], run, lambda: "step 4 was not done")
        run.kill()
    assert sorted(folder.name for folder in snapshots.iterdir()) == ["step_000000", "step_000002", "step_000004"]
    assert workspace.lines("evals.jsonl") == []

    shutil.copytree(workspace.directory(), workspace.directory("kept"))
    done = workspace.train("--resume", overrides={"placement.mode": "separate"})  # evaluates on shared engines
    assert "nothing is left to train" in done.stdout
    assert list(snapshots.iterdir()) == []
    assert any("are given up" in event.get("message", "") for event in workspace.lines("events.jsonl"))
    shutil.rmtree(workspace.directory())
    workspace.directory("kept").rename(workspace.directory())

    (workspace.folder / "go").touch()
    before = (workspace.directory() / "metrics.jsonl").read_bytes()
    workspace.train("--resume", overrides=overrides)
    evals = workspace.lines("evals.jsonl")
    assert [(line["step"], line["eval/reward_mean"]) for line in evals] == [(0, 0.0), (2, 2.0), (4, 4.0)]
    assert (workspace.directory() / "metrics.jsonl").read_bytes() == before
    assert list(snapshots.iterdir()) == []
