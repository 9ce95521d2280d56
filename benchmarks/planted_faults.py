"""Eight broken engines and twelve healthy runs, each diagnosed by `miles doctor`.

    python benchmarks/planted_faults.py [NAME ...] [--out TABLE.md]

Each run is real: a tiny random model, engine `local` with one fault put into it, backend `fsdp`, five steps in this
process. The proof of weight updates is off, so that the fault reaches the tokens: it would stop most of these runs at
the first update.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import platform
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from miles_core import plan as plans
from miles_core.config.load import load
from miles_core.config.resolve import resolve
from miles_core.doctor.diagnosis import Diagnosis, diagnose
from miles_core.driver.launch import train
from miles_core.errors import MilesError
from miles_core.kinds.engine import Chunk, GenerateRequest
from miles_core.registry import discover
from miles_core.report.load import load_run
from miles_core.routing.hf import find_routers
from miles_core.testing.tiny import make_tiny_model
from miles_core.tokenizer import ChatTokenizer
from miles_core.tracking.live import make_display
from miles_local import weights
from miles_local.engine import LocalEngine
from miles_local.model import LocalModel

REWARD = '''
def score(scored):
    """Share of lower-case letters: learnable by a random model."""
    text = scored.response
    return sum(c.islower() for c in text) / max(len(text), 1)
'''
WORDS = ("one", "two", "three", "four", "five", "six", "seven")


# --- engines with one fault -------------------------------------------------------------------------------------------


class PerturbedRouter(LocalEngine):
    """Its routers see other hidden states than the experts."""

    def _load(self) -> LocalModel:
        model = super()._load()
        for router in find_routers(model._model):
            router.module.register_forward_pre_hook(lambda _, args: (args[0] + 0.7 * args[0].roll(1, -1), *args[1:]))
        return model


class StaleWeights(LocalEngine):
    """Serves the version before the one it names."""

    held: Any = None

    async def _swap(self, model: LocalModel, staging: Any) -> None:
        version, newest = staging.version, dict(staging.tensors)
        if self.held is not None:
            staging.tensors.update(self.held)
        self.held = newest
        await super()._swap(model, staging)
        assert self._version == version


class RetokenizedPrompt(LocalEngine):
    """Takes the prompt's text, without special tokens, and tokenizes it."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        tokenizer = ChatTokenizer.from_dir(self._context.model_path)
        text = tokenizer.decode(request.token_ids, skip_special=True)
        other = replace(request, token_ids=tuple(tokenizer.encode(text)))
        async for chunk in super().generate(other):
            yield chunk


class WrongTemperature(LocalEngine):
    """Samples and scores at 0.6 of the temperature it was asked for."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        colder = replace(request.params, temperature=0.6 * request.params.temperature)
        async for chunk in super().generate(replace(request, params=colder)):
            yield chunk


class ShiftedLogprobs(LocalEngine):
    """Reports the log-prob of the token before."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        last = -1.0
        async for chunk in super().generate(request):
            moved = (last, *chunk.logprobs)
            last = moved[-1]
            yield replace(chunk, logprobs=moved[: len(chunk.logprobs)])


class DroppedLayer(LocalEngine):
    """Never updates its second layer."""

    async def _swap(self, model: LocalModel, staging: Any) -> None:
        if staging.version > 0:
            for name, tensor in model.views.items():
                if ".layers.1." in name:
                    staging.tensors[name] = tensor.clone()
        await super()._swap(model, staging)


class StaleCache(LocalEngine):
    """Keeps its prefix cache over an update."""

    async def _swap(self, model: LocalModel, staging: Any) -> None:
        async with self._between_steps:
            await self._in_thread(weights.replace, model.views, staging.tensors)
            self._staging = None
            self._version = staging.version


class WrongLabel(LocalEngine):
    """Names the next version."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        async for chunk in super().generate(request):
            yield replace(chunk, weight_version=chunk.weight_version + 1)


# --- cases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    engine: str | None = None
    """Class of this module, or None for the engine as it is."""
    contract: str | None = None
    """The one that must be named; None when nothing may be found."""
    cause: str | None = None
    model: str = "dense-float32"
    changes: dict[str, Any] = field(default_factory=dict)
    """Dotted keys of the run-file."""
    proved: bool = False
    """Leave the proof of weight updates on."""


UNPROVED = {"weights": {"verify": "off", "probes": 0}}
FAULTS = {
    "perturbed router": Case(
        "PerturbedRouter", "routes", "router differs", "moe-bfloat16", {"rollout.routes": "record"}
    ),
    "stale weights": Case("StaleWeights", "versions", "weights not delivered"),
    "re-tokenized prompt": Case("RetokenizedPrompt", "tokens", "other prompt"),
    "temperature mismatch": Case("WrongTemperature", "logprobs", "temperature"),
    "shifted log-probs": Case("ShiftedLogprobs", "logprobs", "shifted log-probs"),
    "dropped layer update": Case("DroppedLayer", "versions", "weights not delivered"),
    "stale key-values": Case("StaleCache", "versions", "cache outlived its weights"),
    "wrong version label": Case("WrongLabel", "versions", "wrong version label"),
}
HEALTHY = {
    "float32": Case(),
    "bfloat16": Case(model="dense-bfloat16"),
    "temperature 0.6": Case(changes={"rollout.sampling.temperature": 0.6}),
    "tis, two minibatches": Case(changes={"corrections": ["tis"], "schedule.minibatches": 2}),
    "rollout as old policy": Case(changes={"objective.old_logprobs": "rollout"}),
    "experts recorded, bfloat16": Case(model="moe-bfloat16", changes={"rollout.routes": "record"}),
    "experts replayed, bfloat16": Case(model="moe-bfloat16", changes={"rollout.routes": "replay"}),
    "experts recorded, one step off": Case(
        model="moe-bfloat16",
        changes={"rollout.routes": "record", "schedule.mode": "one-step-off", "placement.mode": "separate"},
    ),
    "one step off": Case(changes={"schedule.mode": "one-step-off", "placement.mode": "separate"}),
    "fully asynchronous": Case(changes={"schedule.mode": "fully-async", "placement.mode": "separate"}),
    "fully asynchronous, in place": Case(
        changes={
            "schedule.mode": "fully-async",
            "schedule.on_weight_update": "in-place",
            "placement.mode": "separate",
            "rollout.sampling.max_tokens": 96,
            "optimizer.lr": 0.03,
            "schedule.steps": 8,
        }
    ),
    "high learning rate, bfloat16": Case(
        model="dense-bfloat16", changes={"optimizer.lr": 0.03, "schedule.steps": 8, "engine.prefix_cache": False}
    ),
}
CASES = {**FAULTS, **HEALTHY}


def make_model(kind: str, folder: Path) -> Path:
    shape, dtype = kind.split("-")
    if shape == "dense":
        return make_tiny_model(folder, seed=0, dtype=dtype)  # type: ignore[arg-type]
    experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
    return make_tiny_model(folder, architecture="qwen3-moe", layers=4, dtype=dtype, overrides=experts)  # type: ignore[arg-type]


def run_file(case: Case, folder: Path) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "name": "run",
        "seed": 7,
        "model": str(make_model(case.model, folder / "model")),
        "data": str(folder / "train.jsonl"),
        "rewards": [f"{folder}/reward.py:score"],
        "engine": {"use": "local"},
        "rollout": {"sampling": {"max_tokens": 24}, "reward_workers": 1},
        "schedule": {"steps": 5, "groups_per_step": 4, "group_size": 3},
        "optimizer": {"lr": 0.01},
        "checkpoint": {"export_hf": False},
        "placement": {"device": "cpu"},
        "tracking": {"dir": str(folder / "runs"), "trackers": []},
        **(UNPROVED if case.engine and not case.proved else {}),
    }
    for key, value in case.changes.items():
        *path, last = key.split(".")
        inner = tree
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return tree


def examine(case: Case, folder: Path) -> Diagnosis:
    """Run the case in `folder` and read what it left."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reward.py").write_text(REWARD)
    (folder / "train.jsonl").write_text("".join(json.dumps({"prompt": f"say {word}"}) + "\n" for word in WORDS))
    (folder / "run.yaml").write_text(yaml.safe_dump(run_file(case, folder)))
    registry = discover()
    source = load(folder / "run.yaml")
    resolved = resolve(source, registry)
    if case.engine:
        pick = resolved.one["engine"]
        broken = replace(pick, capability=replace(pick.capability, load=f"planted_faults:{case.engine}"))
        resolved = replace(resolved, one={**resolved.one, "engine": broken})
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(MilesError):
        display = make_display(steps=resolved.spec.schedule.steps, groups=4, plain=True)
        plan = plans.make_plan(resolved, plans.Host.here())
        train(source, resolved, registry, plan, display, resume=False, fresh=True)
    return diagnose(load_run(folder / "runs" / "run"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"Cases: {', '.join(CASES)}; all by default.")
    parser.add_argument("--out", type=Path, help="Also write the table here.")
    options = parser.parse_args()
    lines = ["| run | expected | found | since | evidence |", "|---|---|---|---|---|"]
    wrong = 0
    for name in options.names or CASES:
        case, began = CASES[name], time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            diagnosis = examine(case, Path(folder))
        found = diagnosis.findings
        good = [finding.contract for finding in found] == ([case.contract] if case.contract else [])
        wrong += not good
        said = "; ".join(f"{each.contract} ({each.cause})" for each in found) or "nothing"
        since = ", ".join(str(each.since) for each in found)
        evidence = found[0].evidence[0] if found else dict(diagnosis.readings)["logprobs"]
        lines.append(f"| {name} | {case.contract or 'nothing'} | {said} | {since} | {evidence.replace('|', '/')} |")
        print(f"{'ok ' if good else 'BAD'} {time.monotonic() - began:5.1f} s  {name}: {said}", flush=True)
    print("\n".join(["", *lines]))
    if options.out:
        machine = f"{platform.machine()}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"
        options.out.write_text(
            "\n".join(["# Planted faults, diagnosed", "", f"Machine: {machine}.", "", *lines]) + "\n"
        )
    raise SystemExit(wrong)


if __name__ == "__main__":
    main()
