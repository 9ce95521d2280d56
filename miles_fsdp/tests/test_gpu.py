"""On an NVIDIA GPU: the same numbers as on the CPU, and an offload cycle that loses nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from miles_core.kinds.backend import BackendContext, LossSettings, OptimizerSettings
from miles_core.testing.backend_oracle import example_batch
from miles_core.testing.tiny import make_tiny_model
from miles_fsdp.backend import FsdpBackend
from miles_fsdp.options import FsdpOptions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture
def context(tmp_path: Path) -> BackendContext:
    return BackendContext(
        model_path=str(make_tiny_model(tmp_path / "model", seed=0)),
        device="cuda:0",
        rank=0,
        world_size=1,
        seed=0,
        optimizer=OptimizerSettings(
            lr=1e-3,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=0.0,
            schedule="constant",
            warmup_steps=0,
            min_lr_ratio=0.0,
            total_steps=10,
            clip_grad_norm=1.0,
        ),
        loss=LossSettings(load="miles_core.algorithms.losses:ppo_clip", options={}),
        reference=False,
    )


def make(context: BackendContext) -> FsdpBackend:
    return FsdpBackend(FsdpOptions(param_dtype="float32"), context)


def test_log_probs_and_updates_are_those_of_the_cpu(context: BackendContext) -> None:
    batch = example_batch(np.random.default_rng(0), (5, 9, 7))
    on_gpu, on_cpu = make(context), make(replace(context, device="cpu"))
    for _ in range(3):
        np.testing.assert_allclose(on_gpu.log_probs(batch), on_cpu.log_probs(batch), atol=2e-4)
        found, expected = on_gpu.train_step(batch).values, on_cpu.train_step(batch).values
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)


def test_offload_frees_the_device_and_loses_nothing(context: BackendContext) -> None:
    batch = example_batch(np.random.default_rng(0), (5, 9, 7))
    cycled, straight = make(context), make(context)
    for backend in (cycled, straight):
        backend.train_step(batch)
    before = torch.cuda.memory_allocated()
    cycled.offload()
    assert torch.cuda.memory_allocated() < before
    cycled.onload()
    for backend in (cycled, straight):
        backend.train_step(batch)
    np.testing.assert_array_equal(cycled.log_probs(batch), straight.log_probs(batch))
