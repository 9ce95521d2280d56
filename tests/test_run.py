"""A whole run from one command: what it does, what it writes, how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from miles_core.testing.preloaded import environment
from miles_core.testing.waiting import wait_until
from miles_core.tracking.names import is_clock, undeclared

if TYPE_CHECKING:
    from .conftest import Workspace


def test_a_run_writes_what_it_promises_and_the_same_seed_gives_the_same_metrics(workspace: Workspace) -> None:
    workspace.train()
    first = (workspace.directory() / "metrics.jsonl").read_bytes()
    for name in (
        "run.yaml",
        "run.source.yaml",
        "env.json",
        "plan.json",
        "timings.jsonl",
        "events.jsonl",
        "report.html",
    ):
        assert (workspace.directory() / name).stat().st_size > 0, name
    assert len(list((workspace.directory() / "rollouts").glob("step_*.parquet"))) == 4
    lines = workspace.lines()
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert "eval/reward_mean" in lines[0]
    assert all(line["contract/versions/s_old_max"] == 0 for line in lines[1:])
    assert all(line["contract/logprobs/abs_diff_max"] < 1e-3 for line in lines[1:])
    timings = workspace.lines("timings.jsonl")
    assert undeclared(key for line in (*lines, *timings) for key in line) == []
    assert not any(is_clock(key) for line in lines for key in line)

    workspace.train("--fresh")
    assert (workspace.directory() / "metrics.jsonl").read_bytes() == first
    assert (workspace.directory("tiny.1") / "metrics.jsonl").read_bytes() == first  # kept aside, not lost

    workspace.train("--fresh", overrides={"seed": 8})
    assert (workspace.directory() / "metrics.jsonl").read_bytes() != first


def test_the_order_of_a_step_is_collect_train_save_publish_evaluate(workspace: Workspace) -> None:
    workspace.train(overrides={"schedule.steps": 2})
    kinds = [event["event"] for event in workspace.lines("events.jsonl")]
    kinds = [kind for kind in kinds if kind in ("publish", "save", "eval", "stop")]
    assert kinds == ["publish", "eval", "save", "publish", "save", "publish", "eval", "stop"]


def test_a_directory_of_another_run_is_refused_and_resume_needs_the_same_run_file(workspace: Workspace) -> None:
    killed = workspace.struck(signal.SIGKILL, 0, name="report.html.partial", overrides={"schedule.steps": 1})
    assert killed == -signal.SIGKILL
    refused = workspace.train(overrides={"schedule.steps": 1}, code=1)
    assert "--resume" in refused.stderr
    other = workspace.train("--resume", overrides={"optimizer.lr": 0.5}, code=1)
    assert "optimizer.lr" in other.stderr
    lines = workspace.lines()
    assert not (workspace.directory() / "report.html").exists()
    rest = workspace.train("--resume", overrides={"schedule.steps": 1})
    assert "nothing is left to train. To go on, raise schedule.steps." in rest.stdout
    assert f"report: {workspace.directory()}/report.html" in rest.stdout
    assert (workspace.directory() / "report.html").exists()
    assert [line["step"] for line in lines] == [0, 1], "what is refused loses nothing"
    assert workspace.lines() == lines
    metrics = workspace.directory() / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes().splitlines(keepends=True)[0])  # killed after its last checkpoint
    workspace.train("--resume", overrides={"schedule.steps": 1})
    assert workspace.lines() == lines
    workspace.train("--resume", overrides={"schedule.steps": 2})
    assert [line["step"] for line in workspace.lines()] == [0, 1, 2]


def test_weights_are_proven_equal_when_asked(workspace: Workspace) -> None:
    workspace.train(overrides={"schedule.steps": 1, "check_weight_update_equal": True})
    assert any(event["event"] == "weights_equal" for event in workspace.lines("events.jsonl"))


HOLDING = """
import time
from pathlib import Path

def score(scored):
    folder = Path(__file__).parent
    while (folder / "hold").exists():
        (folder / "held").touch()
        time.sleep(0.05)
    return len(scored.response) % 3
"""


@pytest.mark.parametrize("signals", [1, 2])
def test_ctrl_c_once_saves_and_twice_stops_now(workspace: Workspace, signals: int) -> None:
    long = {"schedule.steps": 100_000, "checkpoint.every_steps": 90_000, "rollout.reward_timeout_s": 600.0}
    (workspace.folder / "reward.py").write_text(HOLDING)
    output, hold = workspace.folder / "output.txt", workspace.folder / "hold"
    with (
        output.open("w") as file,
        subprocess.Popen(workspace.command(overrides=long), stdout=file, stderr=file, env=environment()) as run,
    ):
        wait_until(lambda: len(workspace.lines()) >= 2, run, output.read_text)
        if signals == 2:
            hold.touch()
            wait_until((workspace.folder / "held").exists, run, output.read_text)
        run.send_signal(signal.SIGINT)
        if signals == 2:
            wait_until(lambda: "finished and saved first" in output.read_text(), run, output.read_text)
            run.send_signal(signal.SIGINT)  # the step would never end
        run.wait(timeout=240)
    assert run.returncode == 130, output.read_text()
    assert "finished and saved first" in output.read_text()
    steps = len(workspace.lines()) - 1
    saved = sorted(path.name for path in (workspace.directory() / "checkpoints").iterdir())
    assert saved == ([f"step_{steps:06d}"] if signals == 1 else [])


def test_nothing_is_left_running(workspace: Workspace) -> None:
    # Not forked from a process whose command line would be its own.
    subprocess.run(workspace.command(overrides={"schedule.steps": 1}), env=environment(), check=True)
    mine = str(workspace.folder)
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                line = (process / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            assert mine not in line, line


def test_a_run_that_fails_before_its_first_step_says_why_and_reports_nothing(workspace: Workspace) -> None:
    (workspace.folder / "agent.py").write_text("async def play(task): ...\nraise RuntimeError('no key')\n")
    agent = {"use": "agent", "function": f"{workspace.folder}/agent.py:play"}
    done = workspace.train(overrides={"environment": agent}, code=2)
    assert done.stderr.startswith("error: ")
    assert "RuntimeError: no key" in done.stderr
    assert "report" not in done.stdout + done.stderr
    assert not (workspace.directory() / "report.html").exists()


def test_dry_run_prints_the_plan_and_takes_nothing(workspace: Workspace) -> None:
    done = workspace.train("--dry-run")
    assert "fsdp" in done.stdout
    assert "local" in done.stdout
    assert not workspace.directory().exists()
