"""Whole runs over real SGLang: one replays routes and has its server killed, one samples without a stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from miles_core.testing.engine_oracle import make_models
from miles_core.testing.tiny import make_tiny_model
from miles_core.tracking.run_dir import read_lines
from miles_sglang.process import _left_behind

pytestmark = pytest.mark.sglang

REWARD = """
def score(scored):
    text = scored.response
    return sum(c.islower() for c in text) / max(len(text), 1)
"""

HELD_AT_STEP_2 = """
import time
from pathlib import Path

calls = 0

def score(scored):
    global calls
    calls += 1
    while calls > 6 and not (Path(__file__).parent / "go").exists():
        time.sleep(0.05)
    text = scored.response
    return sum(c.islower() for c in text) / max(len(text), 1)
"""

DEADLINE_S = 900
"""A run that takes longer hangs. It starts a server, or two in turn, and a busy machine needs minutes for one."""


class Job:
    """A run in a process of its own, over servers it starts."""

    def __init__(
        self, folder: Path, model: Path, engine: dict[str, Any], reward: str = REWARD, **sections: Any
    ) -> None:
        (folder / "reward.py").write_text(reward)
        rows = [{"prompt": f"say {word}"} for word in ("one", "two", "three", "four", "five")]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        run: dict[str, Any] = {
            "name": "run",
            "seed": 3,
            "model": str(model),
            "data": {"train": str(folder / "train.jsonl")},
            "rewards": [f"{folder / 'reward.py'}:score"],
            "rollout": {"sampling": {"max_tokens": 24}, "reward_workers": 1},
            "schedule": {"steps": 3, "groups_per_step": 2, "group_size": 3},
            "optimizer": {"lr": 1e-2},
            "checkpoint": {"every_steps": 10, "export_hf": False},
            "placement": {"device": "cpu"},
            "tracking": {"dir": str(folder / "runs"), "trackers": []},
            "engine": {"use": "sglang", **engine},
        }
        for name, section in sections.items():
            run[name] = {**run.get(name, {}), **section} if isinstance(section, dict) else section
        self.directory = folder / "runs" / "run"
        (folder / "run.yaml").write_text(json.dumps(run))
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._output = folder / "output.txt"
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "miles_core.cli", "train", str(folder / "run.yaml"), "--plain"],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        """A test that failed leaves no run; the guards of its servers end those."""
        self.process.kill()
        self.process.wait()

    def wait(self) -> None:
        try:
            code = self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"the run hangs: {self.output()[-3000:]}") from error
        assert code == 0, self.output()[-3000:]

    def output(self) -> str:
        return self._output.read_text()

    def lines(self, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
        path = self.directory / file
        return list(read_lines(path)) if path.exists() else []

    def servers(self) -> list[psutil.Process]:
        """The launcher processes of the run's servers."""
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if "sglang_cpu.launch" in " ".join(child.cmdline())]


def check(job: Job, steps: int) -> None:
    lines = job.lines()
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert [event for event in job.lines("events.jsonl") if event["event"] == "contract_broken"] == []
    for line in lines:
        assert line["contract/logprobs/abs_diff_mean"] < 1e-5, "engine and trainer disagree in float32"


def still_there(word: str) -> list[list[str]]:
    """Command lines of processes that name `word`."""
    found = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [line for line in found if any(word in part for part in line)]


def test_a_run_goes_on_when_its_server_is_killed_and_its_routes_stay_exact(
    cpu_options: dict[str, object], tmp_path: Path
) -> None:
    model = make_tiny_model(
        tmp_path / "model", architecture="qwen3-moe", tie=False, overrides={"num_experts": 8, "norm_topk_prob": True}
    )
    sections: dict[str, Any] = {"schedule": {"steps": 5}, "rollout": {"routes": "replay", "reward_timeout_s": 900.0}}
    with Job(tmp_path, model, {**cpu_options}, HELD_AT_STEP_2, **sections) as job:
        deadline = time.monotonic() + DEADLINE_S
        while not job.lines() and time.monotonic() < deadline and job.process.poll() is None:
            time.sleep(0.05)
        assert job.lines(), f"no step was done: {job.output()[-3000:]}"
        assert job.process.poll() is None, job.output()[-3000:]
        (server,) = job.servers()
        shared = list(_left_behind(server.pid))
        assert shared, "SGLang keeps nothing in shared memory any more: remove `note_files`"
        for process in [server, *server.children(recursive=True)]:
            process.send_signal(signal.SIGKILL)
        (tmp_path / "go").touch()
        job.wait()
    check(job, 5)
    assert all(line["contract/routes/different_fraction"] == 0 for line in job.lines())
    assert all(line["contract/routes/coverage"] == 1 for line in job.lines())
    log = (job.directory / "logs" / "driver-0.log").read_text()
    assert "the server failed and is brought back (1)" in log
    assert (job.directory / "logs" / "engine-0.log").stat().st_size
    assert still_there(str(model)) == []
    assert [path for path in shared if path.exists()] == []


def test_a_run_that_never_stops_sampling_over_a_server_it_is_attached_to(
    seeded: Any, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    engine = {"urls": [seeded.url], "dtype": "float32", "deterministic": True}
    sections: dict[str, Any] = {
        "schedule": {"steps": 4, "mode": "fully-async"},
        "placement": {"mode": "separate"},
        "corrections": ["tis"],
    }
    with Job(tmp_path, make_models(tmp_path_factory.getbasetemp()).served, engine, **sections) as job:
        job.wait()
    lines = job.lines()
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [event for event in job.lines("events.jsonl") if event["event"] == "contract_broken"] == []
    assert seeded.process.exit_code is None, "the run ended a server that is not its own"


@pytest.mark.slow
@pytest.mark.parametrize("pick", ["disk-delta", "p2p", "ray"])
def test_transports_and_executors_reach_a_server_through_the_engine_alone(
    seeded: Any, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, pick: str
) -> None:
    engine = {"urls": [seeded.url], "dtype": "float32", "deterministic": True}
    delta = {"use": "disk-delta", "publish_dir": str(tmp_path / "published"), "local_dir": str(tmp_path / "local")}
    sections: dict[str, Any] = {"schedule": {"steps": 2}, "check_weight_update_equal": True}
    sections["transport"] = {"disk-delta": delta, "p2p": "p2p", "ray": "broadcast"}[pick]
    if pick != "disk-delta":
        sections |= {"executor": "ray", "placement": {"mode": "separate"}}
    with Job(tmp_path, make_models(tmp_path_factory.getbasetemp()).served, engine, **sections) as job:
        job.wait()
    check(job, 2)
    assert [event for event in job.lines("events.jsonl") if event["event"] == "weights_equal"]
