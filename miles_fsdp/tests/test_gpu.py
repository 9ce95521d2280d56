"""The backend on a CUDA device: the same kit, and memory that offloading really frees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles_core.errors import RunError
from miles_core.kinds.backend import BackendContext
from miles_core.testing.backend import BackendConformance, weights
from miles_core.testing.backend_oracle import example_batch
from miles_core.testing.tiny import make_tiny_model
from miles_fsdp.backend import FsdpBackend
from miles_fsdp.options import FsdpOptions

from . import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


class TestCuda(BackendConformance):
    dtype = "float32"
    device = "cuda:0"
    tags = frozenset({"multi-rank", "reference-model"})

    def make(self, context: BackendContext, *, micro_batch_tokens: int) -> FsdpBackend:
        return FsdpBackend(FsdpOptions(param_dtype="float32", micro_batch_tokens=micro_batch_tokens), context)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu")
    make_tiny_model(folder / "model", dtype="bfloat16", context=64, hidden=128, layers=4, vocab=20000)
    return folder


def made(folder: Path, **changes: Any) -> FsdpBackend:
    settings = {"param_dtype": "bfloat16", "micro_batch_tokens": 4096, **changes}
    return ranks.backend(folder, 0, 1, device="cuda", optimizer=ranks.TRAINING, **settings)


def test_offload_frees_device_memory_and_float32_masters_survive(folder: Path) -> None:
    batch = example_batch(np.random.default_rng(0), ranks.LENGTHS)
    backend = made(folder, reference=True)
    for _ in range(3):
        backend.train_step(batch)
    masters = {name: master.clone().cpu() for name, master in backend._weights.masters.items()}
    count = sum(master.numel() for master in masters.values())
    state = count * (4 + 8 + 2 + 2)  # master, two moments, compute weights, reference
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        backend.offload()
        backend.offload()
        assert before - torch.cuda.memory_allocated() >= state
        for call in (lambda: backend.log_probs(batch), lambda: backend.train_step(batch), lambda: weights(backend)):
            with pytest.raises(RunError, match="offloaded"):
                call()
        backend.onload()
        backend.onload()
        assert torch.cuda.memory_allocated() == pytest.approx(before, rel=0.01)
    for name, master in backend._weights.masters.items():
        assert torch.equal(master.cpu(), masters[name]), name
        assert not torch.equal(masters[name], masters[name].bfloat16().float()), f"{name} has no float32 bits"
    backend.train_step(batch)
    backend.close()


def test_bfloat16_on_the_device_is_near_float32_on_the_cpu(folder: Path) -> None:
    batch = example_batch(np.random.default_rng(1), ranks.LENGTHS)
    device = made(folder)
    cpu = ranks.backend(folder, 0, 1, optimizer=ranks.TRAINING, param_dtype="float32")
    assert np.abs(device.log_probs(batch) - cpu.log_probs(batch)).max() < 0.3
    ours, theirs = device.train_step(batch).values, cpu.train_step(batch).values
    for name in ("loss", "entropy", "grad_norm"):
        assert ours[name] == pytest.approx(theirs[name], rel=0.05), name
    device.close()
    cpu.close()


@pytest.mark.parametrize("attention", ["packed", "sdpa", "flash_attention_2"])
def test_every_attention_keeps_sequences_apart(folder: Path, attention: str) -> None:
    if attention == "flash_attention_2":
        pytest.importorskip("flash_attn", reason="needs flash-attn")
    batch = example_batch(np.random.default_rng(2), ranks.LENGTHS)
    backend = made(folder, attn_implementation=attention, gradient_checkpointing=True)
    alone = made(folder, attn_implementation=attention, micro_batch_tokens=1)
    assert np.abs(backend.log_probs(batch) - alone.log_probs(batch)).max() < 0.3
    assert backend.train_step(batch).values["loss"] == pytest.approx(alone.train_step(batch).values["loss"], rel=0.05)
    backend.close()
    alone.close()
