"""Does a fully asynchronous run with a staleness limit of 2 learn what the synchronous one learns, and in what time?

    python benchmarks/async_learning.py [--seeds 3] [--steps 28] [--lr 2e-5] [--latency 6]

The quickstart's task and model: SmolLM2-135M adds two digits and answers with the number only. An environment that
waits before it asks stands for tools: its latency is log-normal with a tenfold spread, and a step in turns waits for
the slowest of its trajectories. Both schedules have the same settings, and both runs of a seed go side by side, one
core each, so that they meet the same load. The reward is that of the last quarter of the steps; held-out is a greedy
answer to every prompt that was never trained, after the last step; the time is that of the steps alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

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


HELD_OUT = 5
"""Every fifth addition is never trained."""


def additions() -> list[dict[str, object]]:
    def ask(a: int, b: int) -> list[dict[str, str]]:
        system = {"role": "system", "content": "Answer with the number only."}
        return [system, {"role": "user", "content": f"Calculate {a} + {b}."}]

    return [{"prompt": ask(a, b), "label": str(a + b)} for a in range(1, 10) for b in range(1, 10)]


def prepare(folder: Path) -> None:
    rows = [json.dumps(row) + "\n" for row in additions()]
    (folder / "eval.jsonl").write_text("".join(rows[::HELD_OUT]))
    (folder / "train.jsonl").write_text("".join(row for at, row in enumerate(rows) if at % HELD_OUT))
    (folder / "reward.py").write_text(LAST_NUMBER)
    (folder / "slow_chat.py").write_text(ENVIRONMENT)
    (folder / "slow_chat_plugin.py").write_text(PLUGIN)
    info = folder / "slow_chat-0.1.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-chat\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[miles.plugins]\nslow-chat = slow_chat_plugin\n")


def run_file(folder: Path, arguments: argparse.Namespace) -> dict[str, object]:
    """The quickstart's settings, but for a lower rate, fewer steps, the environment that waits, and no probes."""
    return {
        "name": "x",
        "model": str(Path(arguments.model).resolve()),
        "data": {"train": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl")},
        "environment": {"use": "slow-chat", "latency_s": arguments.latency, "sigma": math.log(10) / (2 * 1.96)},
        "rewards": [f"{folder}/reward.py:score"],
        "rollout": {"sampling": {"max_tokens": 12}, "reward_workers": 1},
        "schedule": {"steps": arguments.steps, "groups_per_step": 4, "group_size": arguments.group_size},
        "loss": {"use": "ppo-clip", "low": 0.2, "high": 0.28},
        "corrections": ["tis"],
        "optimizer": {"lr": arguments.lr, "warmup_steps": 2, "schedule": "cosine", "min_lr_ratio": 0.1},
        "backend": {"use": "fsdp", "micro_batch_tokens": 1024, "logprob_chunk_tokens": 256},
        "weights": {"probes": 0},
        "eval": {"every_steps": arguments.steps, "prompts": 17, "sampling": {"max_tokens": 12}},
        "checkpoint": {"export_hf": False},
        "placement": {"device": "cpu", "mode": "separate"},
        "tracking": {"dir": str(folder / "runs"), "trackers": [], "rollouts_every_steps": 1000},
    }


def start(folder: Path, schedule: str, seed: int) -> subprocess.Popen[str]:
    settings = {"name": f"{schedule}-{seed}", "seed": seed, **SCHEDULES[schedule]}
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "miles_core.cli", "train", str(folder / "run.yaml"), "--plain", "--fresh", *sets]
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ)


def row(folder: Path, schedule: str, seed: int, steps: int) -> str:
    """A line of the table: reward of the last quarter, held-out reward, seconds of all steps, mean age and KL."""
    run = folder / "runs" / f"{schedule}-{seed}"
    lines = [line for line in read_lines(run / "metrics.jsonl") if line["step"] > 0]
    waits = ("time/start_s", "time/eval_s")
    timings = [line for line in read_lines(run / "timings.jsonl") if line["step"] > 0]
    seconds = sum(line["time/step_s"] - sum(line.get(name, 0.0) for name in waits) for line in timings)
    reward = statistics.fmean(line["rollout/reward_mean"] for line in lines[-steps // 4 :])
    age = statistics.fmean(line["contract/versions/token_staleness"] for line in lines)
    kl = statistics.fmean(line["contract/logprobs/kl_k3"] for line in lines)
    held_out = lines[-1]["eval/reward_mean"]
    return f"| {schedule} | {seed} | {reward:.3f} | {held_out:.3f} | {seconds:.0f} | {age:.2f} | {kl:.4f} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="models/smollm2-135m", help="made by examples/prepare_smollm2.py")
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--latency", type=float, default=6.0, help="mean seconds of the environment")
    parser.add_argument("--lr", type=float, default=2e-5, help="peak; two steps of warm-up, then cosine to a tenth")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--keep", type=Path, help="folder for the run directories; else they are removed")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        prepare(folder)
        (folder / "run.yaml").write_text(json.dumps(run_file(folder, arguments)))
        print(
            "| schedule | seed | reward, last quarter | held-out | seconds | age | KL |\n|---|---|---|---|---|---|---|"
        )
        for seed in arguments.seeds:
            runs = {schedule: start(folder, schedule, seed) for schedule in SCHEDULES}
            said = {schedule: run.communicate()[0] for schedule, run in runs.items()}
            for schedule, run in runs.items():
                if run.returncode != 0:
                    raise SystemExit(said[schedule][-4000:])
                print(row(folder, schedule, seed, arguments.steps), flush=True)


if __name__ == "__main__":
    main()
