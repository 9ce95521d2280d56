"""What each remedy does to the mismatch of small random models in bfloat16.

    python benchmarks/mismatch.py [--steps 30] [--seeds 3] [--out TABLE.md]

Every row is a set of whole runs of one run-file, alike but for the remedy: engine `local` decodes token by token in
batches of its own, backend `fsdp` scores packed rows. A run's figure is the mean over its steps (`max` the largest,
reward and entropy those of the last quarter); a cell is the median of the seeds and, below the first of its kind, their
range. `KL to plain` compares runs of one seed. Figures depend on seed and run-file alone, so any load will do: what
remedies cost is measured by `routes_overhead.py` and `true_on_policy.py`.

The rate is low: a random model that learns fast is certain of its tokens after six steps, and then nothing differs.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import platform
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import yaml

from miles_core import plan as plans
from miles_core.config.load import load
from miles_core.config.resolve import resolve
from miles_core.driver.launch import train
from miles_core.registry import discover
from miles_core.report.load import RunRecord, load_run
from miles_core.routing import codec
from miles_core.testing.tiny import make_tiny_model
from miles_core.tracking.live import make_display

REWARD = '''
def score(scored):
    """Share of lower-case letters: learnable by a random model."""
    text = scored.response
    return sum(c.islower() for c in text) / max(len(text), 1)
'''
EXPERTS, TOP_K, LAYERS = 16, 4, 4
MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "Qwen3-MoE, 4 layers, 16 experts, 4 a token": {
        "routes off": {},
        "plain (routes recorded)": {"rollout": {"routes": "record"}},
        "R3": {"rollout": {"routes": "replay"}},
        "R3 + TIS": {"rollout": {"routes": "replay"}, "corrections": ["tis"]},
    },
    "dense Qwen3, 2 layers": {
        "plain": {},
        "TIS": {"corrections": ["tis"]},
        "true-on-policy": {"precision": {"true_on_policy": True}},
    },
}
"""Model to remedies, plain first. True-on-policy exists for registered dense shapes alone."""
EXPERTS_DIFFER, DELTA, KL, KL_TO_PLAIN = "experts differ", "mean \\|Δlogp\\|", "KL (k3)", "KL to plain"
COLUMNS = {
    EXPERTS_DIFFER: ".2%",
    DELTA: ".2e",
    "max": ".3f",
    KL: ".2e",
    KL_TO_PLAIN: ".2f",
    "outside [0, 2]": ".2e",
    "reward": ".3f",
    "entropy": ".2f",
}
"""Column to the form of its figures."""


def run_file(folder: Path, seed: int, steps: int, remedy: Mapping[str, Any]) -> dict[str, Any]:
    rollout = {"sampling": {"max_tokens": 32}, "reward_workers": 1, **remedy.get("rollout", {})}
    return {
        "name": f"seed-{seed}",
        "seed": seed,
        "model": str(folder / "model"),
        "data": str(folder / "train.jsonl"),
        "rewards": [f"{folder}/reward.py:score"],
        "schedule": {"steps": steps, "groups_per_step": 4, "group_size": 8},
        "optimizer": {"lr": 3e-4},
        "checkpoint": {"export_hf": False},
        "placement": {"device": "cpu"},
        "tracking": {"trackers": []},
        **{key: value for key, value in remedy.items() if key != "rollout"},
        "rollout": rollout,
    }


def run(folder: Path, tree: Mapping[str, Any]) -> RunRecord:
    (folder / "run.yaml").write_text(
        yaml.safe_dump({**tree, "tracking": {**tree["tracking"], "dir": str(folder / "runs")}})
    )
    registry, source = discover(), load(folder / "run.yaml")
    resolved = resolve(source, registry)
    with contextlib.redirect_stdout(io.StringIO()):
        display = make_display(steps=resolved.spec.schedule.steps, groups=4, plain=True)
        plan = plans.make_plan(resolved, plans.Host.here())
        train(source, resolved, registry, plan, display, resume=False, fresh=True)
    return load_run(folder / "runs" / str(tree["name"]))


def prepare(folder: Path, model: str) -> None:
    if "MoE" in model:
        shape = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": 32}
        make_tiny_model(
            folder / "model", architecture="qwen3-moe", layers=LAYERS, hidden=64, dtype="bfloat16", overrides=shape
        )
    else:
        make_tiny_model(folder / "model", architecture="qwen3", dtype="bfloat16")
    (folder / "reward.py").write_text(REWARD)
    words = ("one", "two", "three", "four", "five", "six", "seven", "eight")
    (folder / "train.jsonl").write_text("".join(json.dumps({"prompt": f"say {word}"}) + "\n" for word in words))


def figures(record: RunRecord) -> dict[str, float]:
    """Of one run, by column; what was not measured is absent."""

    def values(name: str) -> list[float]:
        return [value for _, value in record.series(name)]

    def late(name: str) -> float:
        series = values(name)
        return mean(series[-max(1, len(series) // 4) :])

    compared = values("contract/logprobs/abs_diff_mean")
    found = {
        DELTA: mean(compared),
        "max": max(values("contract/logprobs/abs_diff_max")),
        KL: mean(values("contract/logprobs/kl_k3")),
        "outside [0, 2]": mean(values("contract/logprobs/ratio_outside_fraction")),
        "reward": late("rollout/reward_mean"),
        "entropy": late("train/entropy"),
    }
    different = values("contract/routes/different_fraction")
    return {EXPERTS_DIFFER: mean(different), **found} if different else found


def table(found: Mapping[str, Sequence[Mapping[str, float]]]) -> list[str]:
    """A line for each remedy; its figures are those of the seeds, in one order for all remedies."""
    plain = [run[KL] for run in next(iter(found.values()))]
    lines = ["| | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, runs in found.items():
        ratios = [{**run, KL_TO_PLAIN: run[KL] / base} for run, base in zip(runs, plain, strict=True)]
        cells = [cell([run[column] for run in ratios if column in run], form) for column, form in COLUMNS.items()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def cell(values: Sequence[float], form: str) -> str:
    if not values:
        return "not measured"
    if not any(values):
        return "0"
    low, middle, high = (format(value, form) for value in (min(values), median(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="Also write the table here.")
    options = parser.parse_args()
    lines: list[str] = []
    for model, remedies in MODELS.items():
        found: dict[str, list[dict[str, float]]] = {name: [] for name in remedies}
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            prepare(folder, model)
            for seed in range(options.seeds):
                for name, remedy in remedies.items():
                    began = time.monotonic()
                    found[name].append(figures(run(folder, run_file(folder, seed, options.steps, remedy))))
                    gc.collect()  # a run's models stand in cycles, and the next one needs the memory
                    said = ", ".join(f"{column} {value:.3g}" for column, value in found[name][-1].items())
                    print(f"{time.monotonic() - began:6.1f} s  {model}: {name}, seed {seed}: {said}", flush=True)
        lines += [f"## {model}", "", *table(found), ""]
    kept, wire = (codec.num_bytes(2, LAYERS, TOP_K, size) for size in (codec.dtype_for(EXPERTS).itemsize, 4))
    lines.append(
        f"Routes take {kept} bytes a token as kept and {wire} raw on the wire ({LAYERS} layers, {TOP_K} experts)."
    )
    print("\n".join(["", *lines]))
    if options.out:
        machine = f"{platform.machine()} CPU, one core, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
        head = f"{options.seeds} seeds x {options.steps} steps; {machine}. `python benchmarks/mismatch.py`"
        options.out.write_text("\n".join(["# Mismatch, measured", "", head, "", *lines]) + "\n")


if __name__ == "__main__":
    main()
