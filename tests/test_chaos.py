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
from miles_core.testing.preloaded import environment
from miles_core.tracking import rollouts

if TYPE_CHECKING:
    from .conftest import Workspace

PLUGIN = """
from miles_core.plugin import Capability, hookimpl

MILES_API = 1


@hookimpl
def miles_environments():
    return [Capability(name="tool", summary="runs a process, then asks", load="tool_chat:ToolChat",
                       provides=frozenset({"needs-rewards"}))]
"""
TOOL = """
import asyncio

from miles_core.kinds.environment import EpisodeResult


class ToolChat:
    def __init__(self, options):
        pass

    def prompts(self, split):
        return None

    async def run(self, prompt, session):
        tool = await asyncio.create_subprocess_exec("sleep", "0.521")
        try:
            if code := await tool.wait():
                raise RuntimeError(f"the tool ended with {code}")
        finally:
            if tool.returncode is None:
                tool.kill()
        await session.complete(prompt.messages)
        return EpisodeResult()

    async def close(self):
        pass
"""
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
    "rollout.engine_restarts": 1000,
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


SIGNS = {"reward": b"reward_worker", "tool": b"sleep"}
"""What tells processes apart that the run itself started; Ray's are told by their title."""


def children(parent: int, sign: bytes) -> list[int]:
    """Processes that `parent` started and whose command line holds `sign`."""
    found = []
    for tasks in Path(f"/proc/{parent}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(pid) for pid in tasks.read_text().split() if sign in command_of(int(pid))]
    return found


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def harm(pid: int, number: int, sign: bytes) -> bool:
    """Signal a process of the run; whether it was still there."""
    try:
        if sign not in command_of(pid):
            return False
        os.kill(pid, number)
    except OSError:
        return False
    return True


def newcomers(workspace: Workspace) -> set[int]:
    """Places of engines that were replaced."""
    events = workspace.lines("events.jsonl")
    return {event["engine"] for event in events if event["event"] == "engine_replaced"}


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
        sign = SIGNS.get(victim, b"ray::")
        if victim in SIGNS:
            pids = children(self._run.pid, sign)
        else:
            placed = processes(self._workspace.lines("events.jsonl"))
            pids = [pid for name, pid in sorted(placed.items()) if name.startswith(victim)]
        if self._run.poll() is not None or not pids or not harm(self._rng.choice(pids), number, sign):
            return False
        self.landed[f"{victim} {signal.Signals(number).name}"] += 1
        return True

    def strike_something(self, blows: Sequence[tuple[str, int]]) -> str | None:
        """One of `blows`; whom it met."""
        victim, number = self._rng.choice(blows)
        return victim if self.strike(victim, number) else None


def with_tool(workspace: Workspace) -> dict[str, str]:
    """Install environment `tool` beside the run-file; the environment variables that make it known."""
    folder = workspace.folder
    (folder / "tool_chat.py").write_text(TOOL)
    (folder / "tool_chat_plugin.py").write_text(PLUGIN)
    info = folder / "tool_chat-0.1.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tool-chat\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[miles.plugins]\ntool-chat = tool_chat_plugin\n")
    known = environment()
    return {**known, "PYTHONPATH": os.pathsep.join([str(folder), known.get("PYTHONPATH", "")])}


@contextlib.contextmanager
def started(
    workspace: Workspace, overrides: dict[str, Any], *arguments: str, env: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """The run, killed when the block fails."""
    command = workspace.command(*arguments, overrides=overrides)
    with (workspace.folder / "output.txt").open("a") as output:
        run = subprocess.Popen(command, stdout=output, stderr=output, env=env or environment(), start_new_session=True)
        try:
            yield run
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
                run.wait()


def ctrl_c(run: subprocess.Popen[bytes]) -> None:
    """As a terminal sends it: to every process of the foreground, Ray's among them."""
    os.killpg(run.pid, signal.SIGINT)


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
    assert last["put_back"] >= last["resubmitted"]  # what was put back last may wait still
    folder = workspace.directory() / "rollouts"
    rows = [row for step in rollouts.steps(folder) for row in rollouts.read(folder, step)]
    names = Counter(row.session_id for row in rows)
    assert len(rows) == steps * groups * size
    assert max(names.values()) == 1, names.most_common(3)
    assert [line["step"] for line in workspace.lines()] == list(range(steps + 1))


def test_an_engine_dies_another_hangs_and_the_run_goes_on(workspace: Workspace) -> None:
    with started(workspace, {**CHAOS, "schedule.steps": 100_000}) as run:
        fire = Fire(workspace, run, seed=0)
        fire.a_step()
        assert fire.strike("engine 0", signal.SIGKILL)
        fire.a_step()  # with the other engine, or with the new one already
        assert fire.strike("engine 1", signal.SIGSTOP)
        fire.wait_for(lambda: newcomers(workspace) >= {0, 1})
        fire.a_step()
        ctrl_c(run)
        ended(workspace, run, 130)
    assert newcomers(workspace) == {0, 1}
    check_nothing_lost(workspace, workspace.lines()[-1]["step"], 2, 3)
    check_versions(workspace)


BLOWS = (
    *[("engine", signal.SIGKILL)] * 6,
    *[("engine", signal.SIGSTOP)] * 3,
    *[("reward", signal.SIGKILL)] * 3,
    *[("reward", signal.SIGSTOP)] * 2,
    *[("tool", signal.SIGKILL)] * 4,
    *[("tool", signal.SIGSTOP)] * 3,
    *[("trainer", signal.SIGKILL)] * 2,
)
UNDER_FIRE = {
    **CHAOS,
    "environment": "tool",
    "rollout.trajectory_timeout_s": 20,
    "rollout.reward_timeout_s": 5,
    "rollout.reward_workers": 2,
}


@pytest.mark.slow
def test_five_minutes_of_chaos(workspace: Workspace) -> None:
    """Then Ctrl-C drains what is left, and the resumed run finishes."""
    env = with_tool(workspace)
    with started(workspace, {**UNDER_FIRE, "schedule.steps": 100_000}, env=env) as run:
        fire = Fire(workspace, run, seed=1)
        fire.a_step()
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and run.poll() is None:
            fire.pause(1.0, 4.0)
            if fire.strike_something(BLOWS) == "trainer":
                fire.a_step()
        ctrl_c(run)
        ended(workspace, run, 130)
    steps = workspace.lines()[-1]["step"] + 3
    with started(workspace, {**UNDER_FIRE, "schedule.steps": steps}, "--resume", env=env) as run:
        ended(workspace, run, 0)
    kinds = Counter(event["event"] for event in workspace.lines("events.jsonl"))
    print(f"{sum(fire.landed.values())} blows {dict(fire.landed)}, {steps} steps, {dict(kinds)}")
    print([event for event in workspace.lines("events.jsonl") if event["event"] == "ledger"][-1])
    assert {name.split()[0] for name in fire.landed} >= {"engine", "reward", "tool"}
    check_nothing_lost(workspace, steps, 2, 3)
    check_versions(workspace)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Three nodes of one CPU each: room for one trainer rank and two engines."""
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_worker_niceness", "0")
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    try:
        for _ in range(2):
            cluster.add_node(**NODE)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


NODE = {"num_cpus": 1, "object_store_memory": 100 * 1024 * 1024}


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


@pytest.mark.slow
def test_a_run_over_several_nodes_loses_one_and_goes_on_with_another(workspace: Workspace, cluster: Any) -> None:
    """Each engine on a node of its own: updates reach both, the loss of a node costs one engine and no trajectory."""
    executor = {"use": "ray", "address": cluster.address, "cpus_per_rank": 1.0, "cpus_per_engine": 1.0}
    with started(workspace, {**CHAOS, "executor": executor, "schedule.steps": 100_000}) as run:
        fire = Fire(workspace, run, seed=2)
        for _ in range(3):
            fire.a_step()
        raylets = {name: parent_of(pid) for name, pid in processes(workspace.lines("events.jsonl")).items()}
        assert len(set(raylets.values())) == 3, "every part is to have a node of its own"
        nodes = {node.all_processes["raylet"][0].process.pid: node for node in cluster.list_all_nodes()}
        lost = next(name for name in ("engine 0", "engine 1") if nodes[raylets[name]] is not cluster.head_node)
        cluster.remove_node(nodes[raylets[lost]], allow_graceful=False)
        fire.a_step()
        fire.a_step()  # the other engine serves on
        cluster.add_node(**NODE)
        fire.wait_for(lambda: bool(newcomers(workspace)))
        fire.a_step()
        now = {name: parent_of(pid) for name, pid in processes(workspace.lines("events.jsonl")).items()}
        assert now[lost] not in raylets.values()
        ctrl_c(run)
        ended(workspace, run, 130)
    check_versions(workspace)
    check_nothing_lost(workspace, workspace.lines()[-1]["step"], 2, 3)
