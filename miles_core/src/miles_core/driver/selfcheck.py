"""`miles check`: each grade uses one more part than the one before, so the first failure shows which part is at fault.

environment -> trainer on made-up data -> engine alone -> one toy step end to end
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from miles_core import batching
from miles_core.config.load import load
from miles_core.config.resolve import ResolvedRun, resolve
from miles_core.driver.settings import choose_device, engine_spec, trainer_spec
from miles_core.errors import MilesError, RunError
from miles_core.kinds.backend import BackendContext
from miles_core.kinds.engine import EngineContext, GenerateRequest
from miles_core.machine import Host
from miles_core.registry import Registry, discover, load_target
from miles_core.types import SamplingParams, TrainBatch

RUN_FILE = """\
name: self-check
model: {model}
data: {data}
rewards: ['{reward}:score']
rollout: {{sampling: {{max_tokens: 6}}, reward_workers: 1}}
schedule: {{steps: 1, groups_per_step: 2, group_size: 2}}
placement: {{device: cpu}}
checkpoint: {{export_hf: false}}
tracking: {{dir: {runs}, trackers: []}}
"""

REWARD = '''\
"""Made-up reward of the self-check."""


def score(scored):
    return float(len(scored.response))
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    name: str
    ok: bool
    seconds: float
    detail: str
    remedy: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "ok": self.ok,
            "seconds": round(self.seconds, 3),
            "detail": self.detail,
            "remedy": self.remedy,
        }


def run_checks() -> Iterator[Outcome]:
    """Run every grade, even after one has failed, and yield each outcome as it comes."""
    with tempfile.TemporaryDirectory(prefix="miles-check-") as folder:
        check = _Check(Path(folder))
        for name, grade, remedy in (
            ("environment", check.environment, "make a fresh environment and install miles-core again"),
            ("trainer", check.trainer, "pip install ./miles_fsdp, and see `miles plugins list`"),
            ("engine", check.engine, "pip install ./plugins/miles-local, and see `miles plugins list`"),
            ("toy step", check.toy_step, "the pieces work alone: report the trace above"),
        ):
            yield _run(name, grade, remedy)


def _run(name: str, grade: Callable[[], str], remedy: str) -> Outcome:
    started = time.monotonic()
    try:
        detail, ok = grade(), True
    except Exception as error:  # noqa: BLE001 — whatever a grade raises is its outcome
        do = error.do if isinstance(error, MilesError) else None
        detail, ok, remedy = f"{type(error).__name__}: {error}", False, do or remedy
    return Outcome(name=name, ok=ok, seconds=time.monotonic() - started, detail=detail, remedy=None if ok else remedy)


class _Check:
    """The grades. Each uses what those before it prepared."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def environment(self) -> str:
        """Python, torch, free space, and no plugin that is broken."""
        import torch

        registry = discover()
        bad = [f"{entry.kind} {entry.name}: {entry.state}" for entry in registry.entries() if entry.state == "broken"]
        bad += [f"{plugin.name}: {plugin.reason}" for plugin in registry.plugins if plugin.state == "broken"]
        if bad:
            raise RunError("a plugin is broken", found="; ".join(bad), do="miles plugins list shows why")
        free_gib = shutil.disk_usage(self.folder).free / 2**30
        if free_gib < 1:
            raise RunError("the disk is nearly full", found=f"{free_gib:.1f} GiB free", where=str(self.folder))
        gpu = f"{torch.cuda.device_count()} GPUs" if torch.cuda.is_available() else "no GPU"
        return f"Python {platform.python_version()}, torch {torch.__version__}, {gpu}, {free_gib:.0f} GiB free"

    def trainer(self) -> str:
        """A few optimizer steps on made-up tokens must raise the log-prob of what is rewarded."""
        resolved, _ = self._resolved()
        spec = trainer_spec(resolved, choose_device("cpu"))
        context = BackendContext(
            model_path=spec.model_path,
            device="cpu",
            rank=0,
            world_size=1,
            seed=0,
            optimizer=replace(spec.optimizer, lr=1e-2, total_steps=4),
            loss=spec.loss,
            reference=False,
            architecture=spec.architecture,
        )
        backend = load_target(spec.load)(spec.options, context)
        try:
            batch = made_up_batch(seed=0)
            before = backend.log_probs(batch)
            for _ in range(3):
                backend.train_step(batch)
            after = backend.log_probs(batch)
        finally:
            backend.close()
        gain = float((after - before)[batch.loss_mask & (batch.advantages > 0)].mean())
        if not gain > 0:
            raise RunError("training does not learn", expected="a rising log-prob", found=f"{gain:+.4f} nats a token")
        return f"{resolved.one['backend'].capability.name}: rewarded tokens gained {gain:.2f} nats in 3 steps"

    def engine(self) -> str:
        """Greedy generation twice must give the same tokens with finite log-probs."""
        resolved, _ = self._resolved()
        spec = engine_spec(resolved, choose_device("cpu"))
        context = EngineContext(model_path=spec.model_path, context_length=None, device="cpu", seed=0)
        engine = load_target(spec.load)(spec.options, context)
        first, second = asyncio.run(_generate_twice(engine))
        if first != second or not first:
            raise RunError("greedy generation is not repeatable", expected=str(first), found=str(second))
        return f"{resolved.one['engine'].capability.name}: {len(first)} tokens, twice the same"

    def toy_step(self) -> str:
        """The whole loop, once."""
        from miles_core import plan as plans
        from miles_core.driver.launch import train
        from miles_core.tracking.live import make_display

        resolved, registry = self._resolved()
        source = load(self.folder / "run.yaml")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            display = make_display(steps=1, groups=2, plain=True)
            plan = plans.make_plan(resolved, Host.here())
            code = train(source, resolved, registry, plan, display, resume=False, fresh=True)
        if code != 0:
            raise RunError("the toy run failed", found=f"exit code {code}: {printed.getvalue()[-500:]}")
        return "collect, train, save, publish: all four contracts checked"

    def _resolved(self) -> tuple[ResolvedRun, Registry]:
        model = self.folder / "model"
        if not model.exists():
            from miles_core.testing.tiny import make_tiny_model

            make_tiny_model(model, seed=0)
            (self.folder / "reward.py").write_text(REWARD)
            prompts = [{"prompt": f"say {word}"} for word in ("one", "two", "three", "four")]
            (self.folder / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
            (self.folder / "run.yaml").write_text(
                RUN_FILE.format(
                    model=model,
                    data=self.folder / "prompts.jsonl",
                    reward=self.folder / "reward.py",
                    runs=self.folder / "runs",
                )
            )
        registry = discover()
        return resolve(load(self.folder / "run.yaml"), registry), registry


def made_up_batch(*, seed: int, sequences: int = 4, length: int = 12, vocab: int = 200) -> TrainBatch:
    """Random tokens of which the second half of each sequence is trained; advantages alternate between +1 and -1."""
    rng = np.random.default_rng(seed)
    total = sequences * length
    mask = np.tile(np.arange(length) >= length // 2, sequences)
    advantages = np.repeat(np.where(np.arange(sequences) % 2 == 0, 1.0, -1.0), length) * mask
    batch = TrainBatch(
        lengths=np.full(sequences, length, dtype=np.int64),
        group_ids=np.arange(sequences, dtype=np.int64) // 2,
        rewards=np.zeros(sequences, dtype=np.float32),
        temperatures=np.ones(sequences, dtype=np.float32),
        token_ids=rng.integers(0, vocab, total).astype(np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -5.0, 0.0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int64),
        advantages=advantages.astype(np.float32),
        token_weights=np.zeros(total, dtype=np.float32),
        correction_weights=np.ones(total, dtype=np.float32),
        old_logprobs=np.where(mask, -5.0, 0.0).astype(np.float32),
    )
    return batching.with_token_weights(batch, "token-mean")


async def _generate_twice(engine: Any) -> tuple[list[int], list[int]]:
    await engine.start()
    try:
        rows: list[list[int]] = []
        for number in range(2):
            request = GenerateRequest(
                request_id=f"check-{number}",
                session_id=f"check-{number}",
                token_ids=(5, 6, 7),
                params=SamplingParams(temperature=0.0, max_tokens=8),
            )
            rows.append([token async for chunk in engine.generate(request) for token in chunk.token_ids])
        return rows[0], rows[1]
    finally:
        await engine.close()
