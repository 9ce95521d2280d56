"""Does a fully asynchronous run with a staleness limit learn what the synchronous one learns, and in what time?

    python benchmarks/async_learning.py [--steps 60] [--seeds 3] [--latency 0.5] [--model models/smollm2-135m]

A tiny random model learns to write lower-case letters; a model that can read learns the quickstart's task, addition of
two digits, answered with the number only. An environment that waits before it asks stands for tools: its
latency is log-normal and longer than sampling and training together. Each run is a process of its own; the reward is
that of the last quarter of the steps, the time that of the steps alone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from miles_core.testing.tiny import make_tiny_model
from miles_core.tracking.run_dir import read_lines

PLUGIN = """
from miles_core.plugin import Capability, hookimpl

MILES_API = 1


@hookimpl
def miles_environments():
    return [Capability(name="slow-chat", summary="waits, then asks for one answer", load="slow_chat:SlowChat",
                       options="slow_chat:Options", provides=frozenset({"needs-rewards"}))]
"""
ENVIRONMENT = """
import asyncio, random

from pydantic import BaseModel

from miles_core.kinds.environment import EpisodeResult


class Options(BaseModel):
    latency_s: float
    sigma: float


class SlowChat:
    def __init__(self, options):
        self._options, self._rng = options, random.Random(0)

    def prompts(self, split):
        return None

    async def run(self, prompt, session):
        sigma = self._options.sigma
        await asyncio.sleep(self._options.latency_s * self._rng.lognormvariate(-sigma * sigma / 2, sigma))
        await session.complete(prompt.messages)
        return EpisodeResult()

    async def close(self):
        pass
"""
REWARD = """
def score(scored):
    text = scored.response
    return sum(c.islower() for c in text) / max(len(text), 1)
"""
LAST_NUMBER = r"""
import re


def score(scored):
    found = re.findall(r"-?\d+", scored.response)
    return float(bool(found) and found[-1] == scored.prompt.label)
"""
SCHEDULES = {
    "sync": {},
    "fully-async": {"schedule.mode": "fully-async", "schedule.max_weight_staleness": 2},
}


def additions() -> list[dict[str, object]]:
    def ask(a: int, b: int) -> list[dict[str, str]]:
        system = {"role": "system", "content": "Answer with the number only."}
        return [system, {"role": "user", "content": f"Calculate {a} + {b}."}]

    return [{"prompt": ask(a, b), "label": str(a + b)} for a in range(1, 10) for b in range(1, 10)]


def prepare(folder: Path, model: str | None) -> None:
    rows: list[dict[str, object]]
    if model is None:
        make_tiny_model(folder / "model", seed=0)
        rows = [{"prompt": f"say {word}", "label": word} for word in ("one", "two", "three", "four", "five", "six")]
    else:
        (folder / "model").symlink_to(Path(model).resolve(), target_is_directory=True)
        rows = additions()
    (folder / "reward.py").write_text(REWARD if model is None else LAST_NUMBER)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "slow_chat.py").write_text(ENVIRONMENT)
    (folder / "slow_chat_plugin.py").write_text(PLUGIN)
    info = folder / "slow_chat-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-chat\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[miles.plugins]\nslow-chat = slow_chat_plugin\n")


def run_file(folder: Path, arguments: argparse.Namespace) -> dict[str, object]:
    return {
        "name": "x",
        "model": str(folder / "model"),
        "data": str(folder / "train.jsonl"),
        "environment": {"use": "slow-chat", "latency_s": arguments.latency, "sigma": math.log(10) / (2 * 1.96)},
        "rewards": [f"{folder}/reward.py:score"],
        "rollout": {"sampling": {"max_tokens": 12 if arguments.model else 8}, "reward_workers": 1},
        "schedule": {"steps": arguments.steps, "groups_per_step": 4, "group_size": arguments.group_size},
        "optimizer": {"lr": arguments.lr},
        "corrections": ["tis"],
        "checkpoint": {"export_hf": False},
        "placement": {"device": "cpu", "mode": "separate"},
        "tracking": {"dir": str(folder / "runs"), "trackers": [], "rollouts_every_steps": 1000},
    }


def train(folder: Path, schedule: str, seed: int, arguments: argparse.Namespace) -> tuple[float, float, float]:
    """Reward of the last quarter, seconds of all steps, and mean age."""
    name = f"{schedule}-{seed}"
    (folder / "run.yaml").write_text(json.dumps(run_file(folder, arguments)))
    settings = {"name": name, "seed": seed, **SCHEDULES[schedule]}
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "miles_core.cli", "train", str(folder / "run.yaml"), "--plain", *sets]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    lines = list(read_lines(folder / "runs" / name / "metrics.jsonl"))
    timings = list(read_lines(folder / "runs" / name / "timings.jsonl"))
    last = [line["rollout/reward_mean"] for line in lines[-arguments.steps // 4 :]]
    age = statistics.fmean(line["contract/versions/token_staleness"] for line in lines)
    if arguments.verbose:
        print(schedule, seed, [round(line["rollout/reward_mean"], 2) for line in lines])
    return statistics.fmean(last), sum(line["time/step_s"] - line.get("time/start_s", 0) for line in timings), age


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--latency", type=float, default=0.5, help="mean seconds of the environment")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--model", help="Hugging Face folder of a model that can read; its task is addition")
    parser.add_argument("--verbose", action="store_true", help="print the reward of every step")
    parser.add_argument("--only", choices=list(SCHEDULES), help="one schedule")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name), arguments.model)
        print("| schedule | seed | reward, last quarter | seconds | age |\n|---|---|---|---|---|")
        for schedule in [arguments.only] if arguments.only else SCHEDULES:
            for seed in range(arguments.seeds):
                reward, seconds, age = train(Path(name), schedule, seed, arguments)
                print(f"| {schedule} | {seed} | {reward:.3f} | {seconds:.0f} | {age:.2f} |", flush=True)


if __name__ == "__main__":
    main()
