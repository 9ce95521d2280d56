"""Something dies every few seconds on executor `ray`: the run finishes, its books add up, nothing is trained twice."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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


class Fire:
    """Blows at the processes of a run that is under way; `landed` counts those that met one."""

    def __init__(self, workspace: Workspace, run: subprocess.Popen[bytes], *, seed: int) -> None:
        self._workspace, self._run, self._rng = workspace, run, random.Random(seed)
        self.landed: Counter[str] = Counter()

    def wait_for(self, sign: Callable[[], bool]) -> None:
        """Until `sign`, or the end of the run; starting takes minutes on a machine that does much else."""
        deadline = time.monotonic() + 400
        while self._run.poll() is None and not sign() and time.monotonic() < deadline:
            time.sleep(0.05)

    def a_step(self) -> None:
        steps = len(self._workspace.lines())
        self.wait_for(lambda: len(self._workspace.lines()) > steps)

    def pause(self, least_s: float, most_s: float) -> None:
        time.sleep(self._rng.uniform(least_s, most_s))

    def strike(self, victim: str, number: int) -> bool:
        """Signal one process whose name begins with `victim`, if there is one."""
        pids = processes(self._workspace.lines("events.jsonl"))
        names = sorted(name for name in pids if name.startswith(victim))
        if self._run.poll() is not None or not names or not harm(pids[self._rng.choice(names)], number):
            return False
        self.landed[f"{victim} {signal.Signals(number).name}"] += 1
        return True

    def strike_something(self, blows: Sequence[tuple[str, int]]) -> str | None:
        """One of `blows`; whom it met."""
        victim, number = self._rng.choice(blows)
        return victim if self.strike(victim, number) else None


@contextlib.contextmanager
def started(workspace: Workspace, overrides: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    """The run, killed when the block fails."""
    from miles_core.testing.preloaded import environment

    command = workspace.command(overrides=overrides)
    with (workspace.folder / "output.txt").open("w") as output:
        run = subprocess.Popen(command, stdout=output, stderr=output, env=environment())
        try:
            yield run
        finally:
            if run.poll() is None:
                run.kill()
                run.wait()


def ended(workspace: Workspace, run: subprocess.Popen[bytes], code: int) -> None:
    assert run.wait(timeout=400) == code, (workspace.folder / "output.txt").read_text()[-3000:]


def check_versions(workspace: Workspace) -> None:
    """Whoever came to serve held the version published last; no token is of a version the engines did not have yet."""
    current, seen = None, set()
    for event in workspace.lines("events.jsonl"):
        if event["event"] == "publish":
            current = event["version"]
            seen.add(current)
        if event["event"] == "engine_replaced":
            assert event["version"] == current
    lines = {line["step"]: line for line in workspace.lines()}
    folder = workspace.directory() / "rollouts"
    for step in rollouts.steps(folder):
        versions = {int(version) for row in rollouts.read(folder, step) for version in row.versions if version >= 0}
        assert versions <= seen
        assert max(versions) <= lines[step]["contract/versions/current"]


def check_nothing_lost(workspace: Workspace, steps: int, groups: int, size: int) -> None:
    last = [event for event in workspace.lines("events.jsonl") if event["event"] == "ledger"][-1]
    assert last["submitted"] == sum(last[fate.value] for fate in Fate)
    assert last["trained"] == steps * groups
    assert last["put_back"] == last["resubmitted"]
    folder = workspace.directory() / "rollouts"
    rows = [row for step in rollouts.steps(folder) for row in rollouts.read(folder, step)]
    names = Counter(row.session_id for row in rows)
    assert len(rows) == steps * groups * size
    assert max(names.values()) == 1, names.most_common(3)
    assert [line["step"] for line in workspace.lines()] == list(range(steps + 1))


def test_an_engine_dies_another_hangs_and_the_run_finishes(workspace: Workspace) -> None:
    steps = 9
    with started(workspace, {**CHAOS, "schedule.steps": steps}) as run:
        fire = Fire(workspace, run, seed=0)
        for number in (signal.SIGKILL, signal.SIGSTOP):
            fire.a_step()
            before = replaced(workspace)
            if fire.strike("engine", number):
                fire.wait_for(lambda before=before: replaced(workspace) > before)  # type: ignore[misc]
        ended(workspace, run, 0)
    assert fire.landed, "the run ended before anything could happen to it"
    check_nothing_lost(workspace, steps, 2, 3)
    check_versions(workspace)


@pytest.mark.slow
def test_five_minutes_of_chaos(workspace: Workspace) -> None:
    """Then Ctrl-C drains what is left, and the resumed run finishes."""
    blows = [("engine", signal.SIGKILL)] * 7 + [("engine", signal.SIGSTOP)] * 4 + [("trainer", signal.SIGKILL)]
    with started(workspace, {**CHAOS, "schedule.steps": 100_000}) as run:
        fire = Fire(workspace, run, seed=1)
        fire.a_step()
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and run.poll() is None:
            fire.pause(1.0, 5.0)
            if fire.strike_something(blows) == "trainer":
                fire.a_step()
        run.send_signal(signal.SIGINT)
        ended(workspace, run, 130)
    steps = workspace.lines()[-1]["step"] + 3
    workspace.train("--resume", overrides={**CHAOS, "schedule.steps": steps}, timeout_s=400)
    kinds = Counter(event["event"] for event in workspace.lines("events.jsonl"))
    print(f"{sum(fire.landed.values())} blows {dict(fire.landed)}, {steps} steps, {dict(kinds)}")
    print(workspace.lines("events.jsonl")[-2])
    assert set(fire.landed) >= {"engine SIGKILL"}
    check_nothing_lost(workspace, steps, 2, 3)
    check_versions(workspace)
