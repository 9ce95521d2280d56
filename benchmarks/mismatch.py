"""What each remedy does to the mismatch of small random models in bfloat16, and what it costs.

    python benchmarks/mismatch.py [--steps 20] [--seeds 3] [--out TABLE.md]

Every row is a set of whole runs of one run-file, alike but for the remedy: engine `local` decodes token by token in
batches of its own, backend `fsdp` scores packed rows. Contract figures are means over steps and seeds (`max` is the
largest); rewards are those of the last quarter of the steps. Speeds are medians over steps as ratios to the first row
of the table, by the wall clock: the runs of a seed follow one another, but on a busy machine they say little.
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
from dataclasses import dataclass
from pathlib import Path
from statistics import median
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
"""Model to remedies. True-on-policy exists for registered dense shapes alone."""


@dataclass(frozen=True)
class Figures:
    """Means over steps and seeds of one remedy."""

    values: Mapping[str, float]

    def cell(self, name: str, form: str = ".2e") -> str:
        value = self.values.get(name)
        return "not measured" if value is None else "0" if value == 0 else format(value, form)


def run_file(folder: Path, seed: int, steps: int, remedy: Mapping[str, Any]) -> dict[str, Any]:
    rollout = {"sampling": {"max_tokens": 32}, "reward_workers": 1, **remedy.get("rollout", {})}
    return {
        "name": f"seed-{seed}",
        "seed": seed,
        "model": str(folder / "model"),
        "data": str(folder / "train.jsonl"),
        "rewards": [f"{folder}/reward.py:score"],
        "schedule": {"steps": steps, "groups_per_step": 4, "group_size": 8},
        "optimizer": {"lr": 3e-3},
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


def figures(records: Sequence[RunRecord]) -> Figures:
    def values(name: str, *, clock: bool = False, skip: int = 0) -> list[float]:
        """Of all steps of all records; without the first `skip` steps."""
        return [v for record in records for step, v in record.series(name, clock=clock) if step > skip]

    rewards = [record.series("rollout/reward_mean") for record in records]
    scored = zip(
        values("tokens/batch", clock=True, skip=1), values("time/log_probs_s", clock=True, skip=1), strict=True
    )
    found = {
        "different": _mean(values("contract/routes/different_fraction")),
        "mean": _mean(values("contract/logprobs/abs_diff_mean")),
        "max": max(values("contract/logprobs/abs_diff_max"), default=None),
        "kl": _mean(values("contract/logprobs/kl_k3")),
        "clipped": _mean(values("contract/logprobs/ratio_outside_fraction")),
        "reward": _mean([value for series in rewards for _, value in series[-max(1, len(series) // 4) :]]),
        "generate": median(values("throughput/rollout_tokens_per_s", clock=True, skip=1)),
        "score": median(tokens / seconds for tokens, seconds in scored),
        "train": median(values("throughput/train_tokens_per_s", clock=True, skip=1)),
    }
    return Figures({name: value for name, value in found.items() if value is not None})


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def table(found: Mapping[str, Figures]) -> list[str]:
    base = next(iter(found.values()))
    lines = [
        "| | experts differ | mean \\|Δlogp\\| | max | KL (k3) | outside [0, 2] | reward | generate | score | train |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in found.items():
        speeds = [
            f"{row.values[key] / base.values[key]:.2f}x" if key in row.values and key in base.values else "-"
            for key in ("generate", "score", "train")
        ]
        cells = [
            row.cell("different", ".2%"),
            row.cell("mean"),
            row.cell("max", ".3f"),
            row.cell("kl"),
            row.cell("clipped"),
            row.cell("reward", ".3f"),
            *speeds,
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="Also write the table here.")
    options = parser.parse_args()
    lines: list[str] = []
    tokens = 0.0
    for model, remedies in MODELS.items():
        records: dict[str, list[RunRecord]] = {name: [] for name in remedies}
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            prepare(folder, model)
            for seed in range(options.seeds):
                for name, remedy in remedies.items():
                    began = time.monotonic()
                    records[name].append(run(folder, run_file(folder, seed, options.steps, remedy)))
                    gc.collect()  # a run's models stand in cycles, and the next one needs the memory
                    print(f"{time.monotonic() - began:6.1f} s  {model}: {name}, seed {seed}", flush=True)
        found = {name: figures(each) for name, each in records.items()}
        lines += [f"## {model}", "", *table(found), ""]
        if "R3" in records:
            counts = [v for record in records["R3"] for _, v in record.series("tokens/batch", clock=True)]
            tokens = sum(counts) / len(counts)
    kept, wire = (codec.num_bytes(2, LAYERS, TOP_K, size) for size in (codec.dtype_for(EXPERTS).itemsize, 4))
    lines.append(
        f"Routes take {kept} bytes a token as kept and {wire} raw on the wire ({LAYERS} layers, {TOP_K} experts), "
        f"{tokens * kept / 1024:.0f} KiB a step here."
    )
    print("\n".join(["", *lines]))
    if options.out:
        machine = f"{platform.machine()} CPU, one core, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
        head = f"{options.seeds} seeds x {options.steps} steps; {machine}. `python benchmarks/mismatch.py`"
        options.out.write_text("\n".join(["# Mismatch, measured", "", head, "", *lines]) + "\n")


if __name__ == "__main__":
    main()
