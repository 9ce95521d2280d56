"""Two ranks that run every scenario once and write what they found; started by `test_two_ranks`.

Run as ``python ranks.py RANK WORLD FOLDER cpu|cuda``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from miles_core.errors import MilesError
from miles_core.kinds.backend import BackendContext, LossSettings, OptimizerSettings
from miles_core.testing.backend import weights
from miles_core.testing.backend_oracle import LOSS, PROBE, TRAINING, example_batch
from miles_core.testing.replay import routed_batch
from miles_core.types import RouteMode, TrainBatch
from miles_fsdp.backend import FsdpBackend
from miles_fsdp.options import FsdpOptions

LENGTHS = (7, 2, 19, 12, 5, 3)


def backend(
    folder: Path,
    rank: int,
    world_size: int,
    *,
    optimizer: OptimizerSettings = PROBE,
    loss: LossSettings = LOSS,
    model: str = "model",
    reference: bool = False,
    device: str = "cpu",
    routes: RouteMode = "off",
    exact: bool = False,
    **options: Any,
) -> FsdpBackend:
    settings: dict[str, Any] = {
        "param_dtype": "float64",
        "micro_batch_tokens": 20,
        "logprob_chunk_tokens": 5,
        **options,
    }
    context = BackendContext(
        model_path=str(folder / model),
        device="cpu" if device == "cpu" else f"{device}:{rank}",
        rank=rank,
        world_size=world_size,
        seed=0,
        optimizer=optimizer,
        loss=loss,
        reference=reference,
        true_on_policy=exact,
        routes=routes,
    )
    return FsdpBackend(FsdpOptions(**settings), context)


def batches(count: int) -> list[TrainBatch]:
    rng = np.random.default_rng(11)
    return [example_batch(rng, LENGTHS) for _ in range(count)]


def one_update(made: FsdpBackend, batch: TrainBatch) -> dict[str, Any]:
    before = weights(made)
    metrics = dict(made.train_step(batch).values)
    result = {"before": before, "metrics": metrics, "after": weights(made)}
    made.close()
    return result


def continue_training(made: FsdpBackend, some: list[TrainBatch]) -> dict[str, Any]:
    metrics = [dict(made.train_step(batch).values) for batch in some]
    result = {"metrics": metrics, "after": weights(made)}
    made.close()
    return result


def run(rank: int, folder: Path, device: str) -> dict[str, Any]:
    """Every scenario's result on this rank, by name."""
    batch, second, third, fourth = batches(4)
    lone = batch.select([2])
    results: dict[str, Any] = {}

    def make(**changes: Any) -> FsdpBackend:
        return backend(folder, rank, 2, device=device, **changes)

    scenarios: dict[str, Callable[[], Any]] = {
        "sharded": lambda: one_update(make(), batch),
        "replicated": lambda: one_update(make(dp_replicate=2), batch),
        "checkpointed": lambda: one_update(make(gradient_checkpointing=True, micro_batch_tokens=1), batch),
        "one sequence": lambda: one_update(make(), lone),
        "experts": lambda: one_update(make(model="experts"), batch),
        "replayed": lambda: one_update(
            make(model="experts", routes="replay", gradient_checkpointing=True), routed_batch()
        ),
        "bfloat16": lambda: one_update(make(param_dtype="bfloat16", model="model32"), batch),
    }
    for name, scenario in scenarios.items():
        results[name] = scenario()

    made = make(reference=True, micro_batch_tokens=4096)
    results["log_probs"] = made.log_probs(batch)
    results["reference"] = made.log_probs(batch, model="reference")
    made.save_hf(folder / "hf")
    made.close()

    for dtype in ("float32", "bfloat16") if device == "cpu" else ("bfloat16",):
        made = make(model=dtype, param_dtype="checkpoint", exact=True)
        results[f"exact {dtype}"] = made.log_probs(batch)
        made.close()

    made = make(model="experts", routes="record", micro_batch_tokens=1)
    made.log_probs(routed_batch())
    results["route counts"] = made.route_counts()
    made.close()

    at = int(np.flatnonzero(batch.loss_mask)[-1])
    poisoned = replace(batch, advantages=np.where(np.arange(batch.num_tokens) == at, np.nan, batch.advantages))
    made = make(loss=replace(LOSS, on_nonfinite="skip"), micro_batch_tokens=1)
    before = weights(made)
    results["skipped"] = made.train_step(poisoned).skipped
    results["unchanged"] = all(torch.equal(before[name], tensor) for name, tensor in weights(made).items())
    made.close()
    made = make(micro_batch_tokens=1)
    try:
        made.train_step(poisoned)
    except MilesError as error:
        results["stopped"] = str(error)
    made.close()

    made = make(optimizer=TRAINING)
    for each in (batch, second):
        made.train_step(each)
    made.save(folder / "from-two")
    results["straight"] = continue_training(made, [third, fourth])
    made = make(optimizer=TRAINING)
    made.load(folder / "from-two")
    results["resumed"] = continue_training(made, [third, fourth])
    made = make(optimizer=TRAINING)
    made.load(folder / "from-one")
    results["from one"] = continue_training(made, [third, fourth])
    try:
        make(dp_replicate=3)
    except MilesError as error:
        results["indivisible"] = str(error)
    return results


def main() -> None:
    rank, world, folder, device = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    collectives = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(collectives, init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    torch.save(run(rank, folder, device), folder / f"results-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
