"""The planned memory of a rank against the peak of live tensors in a real optimizer step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from miles_core.kinds.backend import BackendContext, LossSettings, OptimizerSettings
from miles_core.planning.memory import Work, fsdp
from miles_core.planning.sizes import read_sizes
from miles_core.testing.live_bytes import LiveBytes
from miles_core.testing.tiny import make_tiny_model
from miles_core.types import TrainBatch
from miles_fsdp.backend import FsdpBackend
from miles_fsdp.options import FsdpOptions

TOKENS, CHUNK = 1024, 256

CASES = [
    ("qwen3", "float32", False, 128),
    ("qwen3", "float32", True, 128),
    ("qwen3", "bfloat16", False, 128),
    ("qwen3", "bfloat16", True, 128),
    ("qwen3-moe", "float32", False, 64),
    ("llama", "bfloat16", False, 256),
]


def batch() -> TrainBatch:
    """Two micro-batches of four sequences."""
    lengths = np.full(8, TOKENS // 4, dtype=np.int64)
    n = int(lengths.sum())
    mask = np.ones(n, dtype=np.bool_)
    mask[:: TOKENS // 4] = False
    ones = np.ones(n, dtype=np.float32)
    return TrainBatch(
        lengths=lengths,
        group_ids=np.arange(8, dtype=np.int64),
        rewards=np.zeros(8, dtype=np.float32),
        temperatures=np.ones(8, dtype=np.float32),
        token_ids=np.random.default_rng(0).integers(3, 900, n).astype(np.int32),
        loss_mask=mask,
        rollout_logprobs=-ones,
        versions=np.zeros(n, dtype=np.int64),
        advantages=ones,
        token_weights=(mask / n).astype(np.float32),
        correction_weights=ones,
        old_logprobs=-ones,
    )


@pytest.mark.parametrize(("architecture", "dtype", "recompute", "hidden"), CASES)
def test_the_plan_is_within_a_tenth_of_the_measured_peak(
    tmp_path: Path, architecture: str, dtype: str, recompute: bool, hidden: int
) -> None:
    folder = make_tiny_model(
        tmp_path,
        architecture=architecture,  # type: ignore[arg-type]
        layers=4,
        hidden=hidden,
        vocab=1000,
        context=1024,
        dtype=dtype,  # type: ignore[arg-type]
    )
    optimizer = OptimizerSettings(
        lr=1e-3,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.0,
        schedule="constant",
        warmup_steps=0,
        min_lr_ratio=0.0,
        total_steps=1,
        clip_grad_norm=1.0,
    )
    options = FsdpOptions(gradient_checkpointing=recompute, micro_batch_tokens=TOKENS, logprob_chunk_tokens=CHUNK)
    context = BackendContext(
        model_path=str(folder),
        device="cpu",
        rank=0,
        world_size=1,
        seed=0,
        optimizer=optimizer,
        loss=LossSettings(load="miles_core.algorithms.losses:ppo_clip"),
        reference=False,
    )
    with LiveBytes() as seen:
        backend = FsdpBackend(options, context)
        seen.peak = seen.live  # a step's peak, not that of loading
        backend.train_step(batch())
    work = Work(
        micro_batch_tokens=TOKENS,
        recompute=recompute,
        logits_chunk_tokens=CHUNK,
        precision=dtype,  # type: ignore[arg-type]
    )
    assert fsdp(read_sizes(folder), 1, work).total == pytest.approx(seen.peak, rel=0.10)
