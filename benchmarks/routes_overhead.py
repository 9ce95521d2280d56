"""What recording and replaying routes cost, in processor time on one core.

    python benchmarks/routes_overhead.py [--rounds 7] [--out TABLE.md]

Engine and backend of a small Qwen3-MoE in bfloat16, each with routes off, recorded and, in the backend, replayed, by
turns. Processor time, not wall-clock, so that other work on the machine weighs little; medians over rounds, as ratios
to routes off. Routing is a larger part of this model than of a real one: the ratios are upper bounds.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch

from miles_core.kinds.backend import BackendContext
from miles_core.kinds.engine import EngineContext, GenerateRequest
from miles_core.testing.backend_oracle import LOSS, PROBE, example_batch
from miles_core.testing.tiny import make_tiny_model
from miles_core.types import UNRECORDED, RouteMode, SamplingParams, TrainBatch
from miles_fsdp.backend import FsdpBackend
from miles_fsdp.options import FsdpOptions
from miles_local.engine import LocalEngine
from miles_local.options import LocalOptions

T = TypeVar("T")

EXPERTS, TOP_K, LAYERS, HIDDEN = 16, 4, 4, 128
SEQUENCES, TOKENS = 8, 48


def make_batch() -> TrainBatch:
    rng = np.random.default_rng(0)
    batch = example_batch(rng, [TOKENS] * SEQUENCES)
    order = np.argsort(rng.random((batch.num_tokens, LAYERS, EXPERTS)), axis=-1)
    routes = order[..., :TOP_K].astype(np.int16)
    routes[batch.offsets[1:] - 1] = UNRECORDED
    return replace(batch, routes=routes)


def backend(model: Path, mode: RouteMode) -> FsdpBackend:
    context = BackendContext(
        model_path=str(model),
        device="cpu",
        rank=0,
        world_size=1,
        seed=0,
        optimizer=replace(PROBE, lr=1e-6),  # models that learn nothing stay alike
        loss=LOSS,
        reference=False,
        routes=mode,
    )
    return FsdpBackend(FsdpOptions(), context)


def generation(model: Path, routes: bool) -> Callable[[], float]:
    """One call generates `SEQUENCES` answers of `TOKENS` / 2 tokens and returns the seconds it took."""

    async def whole(engine: LocalEngine) -> None:
        async def one(index: int) -> None:
            params = SamplingParams(max_tokens=TOKENS // 2, seed=index)
            name, prompt = f"r{index}", tuple(range(3 + index, 3 + index + TOKENS // 2))
            request = GenerateRequest(request_id=name, session_id=name, token_ids=prompt, params=params, routes=routes)
            async for _ in engine.generate(request):
                pass

        await asyncio.gather(*(one(index) for index in range(SEQUENCES)))

    async def call() -> float:
        context = EngineContext(model_path=str(model), context_length=None, device="cpu", seed=0, routes=routes)
        engine = LocalEngine(LocalOptions(prefix_cache=False), context)
        await engine.start()
        began = time.process_time()
        await whole(engine)
        spent = time.process_time() - began
        await engine.close()
        return spent

    return lambda: asyncio.run(call())


def spent(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def rotated(names: list[T], by: int) -> list[T]:
    """Whoever comes first after other work pays for cold caches; each does in turn."""
    by %= len(names)
    return names[by:] + names[:by]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    times: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        shape = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": HIDDEN // 2}
        model = make_tiny_model(
            Path(folder) / "model",
            architecture="qwen3-moe",
            layers=LAYERS,
            hidden=HIDDEN,
            dtype="bfloat16",
            overrides=shape,
        )
        batch = make_batch()
        modes: tuple[RouteMode, ...] = ("off", "record", "replay")
        backends = {mode: backend(model, mode) for mode in modes}
        engines = {"off": generation(model, False), "record": generation(model, True)}
        for number in range(options.rounds + 1):
            for mode in rotated(list(backends), number):
                scoring = spent(lambda made=backends[mode]: made.log_probs(batch))  # type: ignore[misc]
                training = spent(lambda made=backends[mode]: made.train_step(batch))  # type: ignore[misc]
                if number:  # the first round warms up
                    times.setdefault(("score", mode), []).append(scoring)
                    times.setdefault(("train", mode), []).append(training)
        for number in range(options.rounds + 1):
            for name in rotated(list(engines), number):
                took = engines[name]()
                if number:
                    times.setdefault(("generate", name), []).append(took)
    lines = ["| | off | recorded | replayed |", "|---|---|---|---|"]
    for what in ("generate", "score", "train"):
        base = median(times[what, "off"])
        cells = [
            f"{median(times[what, mode]) / base:.2f}x" if (what, mode) in times else "as recorded" for mode in modes
        ]
        lines.append(f"| {what} ({base * 1e3:.0f} ms off) | " + " | ".join(cells) + " |")
    print("\n".join(lines))
    if options.out:
        machine = f"{platform.machine()} CPU, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
        page = ["# Overhead of routes", "", f"{machine}. `python benchmarks/routes_overhead.py`", "", *lines]
        options.out.write_text("\n".join(page) + "\n")


if __name__ == "__main__":
    main()
