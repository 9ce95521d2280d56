"""With the batch-invariant operators, a log-prob is a function of its sequence and the weights, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles_core.errors import ConfigError
from miles_core.kinds.backend import BackendContext
from miles_core.testing.backend import weights
from miles_core.testing.backend_oracle import example_batch
from miles_core.testing.tiny import make_tiny_model
from miles_core.types import TrainBatch
from miles_fsdp.backend import FsdpBackend
from miles_fsdp.options import FsdpOptions
from miles_fsdp.packing import pack, scored_positions

from . import ranks

LENGTHS = (7, 2, 40, 12, 90, 3)


@pytest.fixture
def batch() -> TrainBatch:
    return example_batch(np.random.default_rng(4), LENGTHS)


def backend(folder: Path, *, exact: bool = True, **options: Any) -> FsdpBackend:
    context = BackendContext(
        model_path=str(folder),
        device="cpu",
        rank=0,
        world_size=1,
        seed=0,
        optimizer=ranks.PROBE,
        loss=ranks.LOSS,
        reference=False,
        true_on_policy=exact,
    )
    return FsdpBackend(FsdpOptions(**options), context)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packing_chunks_and_recomputation_leave_no_trace(tmp_path: Path, batch: TrainBatch, dtype: Any) -> None:
    folder = make_tiny_model(tmp_path / dtype, architecture="qwen3", dtype=dtype)
    whole = backend(folder).log_probs(batch)
    assert np.count_nonzero(whole) == batch.num_loss_tokens
    for options in ({"micro_batch_tokens": 1}, {"micro_batch_tokens": 50, "logprob_chunk_tokens": 3}):
        assert np.array_equal(backend(folder, **options).log_probs(batch), whole)
    alone = np.concatenate([backend(folder).log_probs(batch.select([s])) for s in range(3)])
    assert np.array_equal(alone, whole[: sum(LENGTHS[:3])])


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True, "micro_batch_tokens": 60}])
def test_the_step_trains_the_policy_that_was_scored(tmp_path: Path, batch: TrainBatch, options: dict[str, Any]) -> None:
    made = backend(make_tiny_model(tmp_path, architecture="qwen3", dtype="bfloat16"), **options)
    scored = made.log_probs(batch)
    with torch.enable_grad():
        logprobs, _ = made._policy(pack(batch, torch.device("cpu")))
    assert logprobs.requires_grad
    assert np.array_equal(logprobs.detach().float().numpy(), scored[scored_positions(batch)])


def test_the_gradient_is_that_of_the_ordinary_operators(tmp_path: Path, batch: TrainBatch) -> None:
    folder = make_tiny_model(tmp_path, architecture="qwen3")
    changes = []
    for exact in (True, False):
        made = backend(folder, exact=exact, micro_batch_tokens=60)
        before = weights(made)
        made.train_step(replace(batch))
        changes.append({name: after - before[name] for name, after in weights(made).items()})
    ours, plain = changes
    for name, change in plain.items():
        assert float(change.abs().max()) > 0, name
        torch.testing.assert_close(ours[name], change, rtol=1e-3, atol=1e-5, msg=name)


def test_a_model_without_profile_is_refused_with_the_list(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="qwen3-4b"):
        backend(make_tiny_model(tmp_path / "llama"))
    with pytest.raises(ConfigError, match="float64"):
        backend(make_tiny_model(tmp_path / "wide", architecture="qwen3", dtype="float64"))
