"""Something dies every few seconds on executor `ray`: the run finishes, its books add up, nothing is trained twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from miles_core.rollout.ledger import Fate
from miles_core.tracking import rollouts

if TYPE_CHECKING:
    from .conftest import Workspace

CHAOS: dict[str, Any] = {
    "executor": {"use": "ray", "num_cpus": 4, "threads": 1},
    "transport": "broadcast",
    "placement.mode": "separate",
    "placement.engines": 2,
    "schedule.mode": "fully-async",
    "schedule.max_concurrent_samples": 12,
    "schedule.unused_groups": "retry",
    "corrections": ["tis"],
    "rollout.sampling.max_tokens": 24,
    "rollout.health_interval_s": 1,
    "rollout.health_timeout_s": 8,
    "weights.timeout_s": 30,
    "eval.every_steps": 1000,
    "checkpoint.every_steps": 2,
    "checkpoint.restarts": 1000,
}


def processes(log: list[dict[str, Any]]) -> dict[str, int]:
    """Process of each part, as the run last said."""
    placed = [event for event in log if event["event"] == "placed"]
    return {
        name: int(where.split()[1])
        for name, where in (placed[-1] if placed else {}).items()
        if isinstance(where, str) and where.startswith("process")
    }


def harm(pid: int, number: int) -> bool:
    """Signal a process of the run; whether it was still there."""
    try:
        if b"ray::" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            return False
        os.kill(pid, number)
    except OSError:
        return False
    return True


def replaced(workspace: Workspace) -> int:
    return sum(event["event"] == "engine_replaced" for event in workspace.lines("events.jsonl"))


def run_under_fire(
    workspace: Workspace, overrides: dict[str, Any], plan: list[tuple[str, int]], *, pause_s: float, settle: bool
) -> Counter[str]:
    """Run to the end while `plan` is carried out, one blow after the other; how many of each kind landed.

    Args:
        pause_s: Seconds at most between a sign of life and the next blow.
        settle: Wait after a blow at an engine until that was replaced.
    """
    from .conftest import environment

    rng, landed = random.Random(0), Counter[str]()
    log = workspace.folder / "output.txt"
    command = workspace.command(overrides=overrides)
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output, env=environment()) as run:

        def wait_for(sign: Callable[[], bool]) -> None:
            deadline = time.monotonic() + 900  # starting takes minutes on a machine that does much else
            while run.poll() is None and not sign() and time.monotonic() < deadline:
                time.sleep(0.05)

        for victim, number in plan:
            steps = len(workspace.lines())
            wait_for(lambda steps=steps: len(workspace.lines()) > steps)  # type: ignore[misc]
            time.sleep(rng.uniform(0, pause_s))
            if run.poll() is not None:
                break
            before = replaced(workspace)
            pids = processes(workspace.lines("events.jsonl"))
            names = [name for name in pids if name.startswith(victim)]
            if names and harm(pids[rng.choice(sorted(names))], number):
                landed[f"{victim} {signal.Signals(number).name}"] += 1
                if settle and victim == "engine":
                    wait_for(lambda before=before: replaced(workspace) > before)  # type: ignore[misc]
        assert run.wait(timeout=400) == 0, log.read_text()[-3000:]
    return landed


def check_nothing_lost(workspace: Workspace, steps: int, groups: int, size: int) -> None:
    (last,) = [event for event in workspace.lines("events.jsonl") if event["event"] == "ledger"]
    assert last["submitted"] == sum(last[fate.value] for fate in Fate)
    assert last["trained"] == steps * groups
    assert last["put_back"] == last["resubmitted"]
    folder = workspace.directory() / "rollouts"
    rows = [row for step in rollouts.steps(folder) for row in rollouts.read(folder, step)]
    names = Counter(row.session_id for row in rows)
    assert len(rows) == steps * groups * size
    assert max(names.values()) == 1, names.most_common(3)
    assert [line["step"] for line in workspace.lines()] == list(range(steps + 1))


def test_engines_and_trainer_die_and_hang_and_the_run_finishes(workspace: Workspace) -> None:
    blows = [("engine", signal.SIGKILL), ("engine", signal.SIGSTOP), ("trainer", signal.SIGKILL)]
    landed = run_under_fire(workspace, {**CHAOS, "schedule.steps": 9}, blows, pause_s=0.3, settle=True)
    events = workspace.lines("events.jsonl")
    kinds = Counter(event["event"] for event in events)
    assert sum(landed.values()) == 3, landed
    assert kinds["engine_replaced"] >= 2, kinds
    assert kinds["restart"] == 1, kinds
    reasons = [event["message"] for event in events if event["event"] == "alarm" and "is lost" in event["message"]]
    assert any("did not answer" in reason for reason in reasons), reasons
    check_nothing_lost(workspace, 9, 2, 3)


@pytest.mark.slow
def test_five_minutes_of_chaos(workspace: Workspace) -> None:
    rng = random.Random(1)
    kinds = [("engine", signal.SIGKILL)] * 4 + [("engine", signal.SIGSTOP)] * 2 + [("trainer", signal.SIGKILL)]
    blows = [rng.choice(kinds) for _ in range(40)]
    landed = run_under_fire(workspace, {**CHAOS, "schedule.steps": 60}, blows, pause_s=3.0, settle=False)
    assert sum(landed.values()) >= 20, landed
    check_nothing_lost(workspace, 60, 2, 3)
