"""The backend on one NVIDIA GPU: the same kit, memory that offloading frees, and fsdp's figures."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

import miles_megatron.start  # noqa: F401
from miles_core.errors import RunError
from miles_core.kinds.backend import BackendContext
from miles_core.testing.backend import BackendConformance, weights
from miles_core.testing.backend_oracle import example_batch
from miles_core.testing.tiny import make_tiny_model
from miles_fsdp.backend import FsdpBackend
from miles_fsdp.options import FsdpOptions
from miles_megatron.backend import MegatronBackend
from miles_megatron.options import MegatronOptions

from .scenarios import LOSS, TRAINING

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
LENGTHS = (9, 4, 12, 7)


class TestCuda(BackendConformance):
    dtype = "float32"
    device = "cuda:0"
    tags: ClassVar[frozenset[str]] = frozenset({"multi-rank", "reference-model", "replays-routes"})

    def make(self, context: BackendContext, *, micro_batch_tokens: int) -> MegatronBackend:
        options = MegatronOptions(param_dtype="float32", micro_batch_tokens=micro_batch_tokens, bucket_mib=1)
        return MegatronBackend(options, context)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu") / "model"
    make_tiny_model(folder, architecture="qwen3", dtype="bfloat16", context=64, hidden=128, layers=4, vocab=20000)
    return folder


def context(model: Path, *, reference: bool = False) -> BackendContext:
    return BackendContext(
        model_path=str(model),
        device="cuda:0",
        rank=0,
        world_size=1,
        seed=0,
        optimizer=TRAINING,
        loss=LOSS,
        reference=reference,
    )


@pytest.mark.parametrize("distributed", [False, True])
def test_offload_frees_device_memory_and_every_tensor_comes_back(model: Path, distributed: bool) -> None:
    batch = example_batch(np.random.default_rng(0), LENGTHS)
    options = MegatronOptions(micro_batch_tokens=4096, distributed_optimizer=distributed)
    backend = MegatronBackend(options, context(model, reference=True))
    for _ in range(3):
        backend.train_step(batch)
    kept = [(tensor.device, tensor.detach().cpu().clone()) for tensor in backend._policy.tensors()]
    count = sum(tensor.numel() for tensor in weights(backend).values())
    on_device = [tensor.untyped_storage() for tensor in backend._policy.tensors() if tensor.device.type == "cuda"]
    storages = {(storage.data_ptr(), storage.nbytes()) for storage in on_device}
    state = sum(nbytes for _, nbytes in storages) + count * 2  # and the reference
    assert state >= count * (2 + 4 + 4 + 8 + 2), "weights, gradients, masters and moments"
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        backend.offload()
        backend.offload()
        assert before - torch.cuda.memory_allocated() >= state
        for call in (lambda: backend.log_probs(batch), lambda: backend.train_step(batch), lambda: weights(backend)):
            with pytest.raises(RunError, match="state is not here"):
                call()
        backend.onload()
        backend.onload()
        assert torch.cuda.memory_allocated() == pytest.approx(before, rel=0.01)
    back = backend._policy.tensors()
    assert len(back) == len(kept)
    for tensor, (device, expected) in zip(back, kept, strict=True):
        assert tensor.device == device
        assert torch.equal(tensor.detach().cpu(), expected)
    backend.train_step(batch)
    backend.close()


def test_bfloat16_agrees_with_fsdp(model: Path) -> None:
    batch = example_batch(np.random.default_rng(1), LENGTHS)
    ours = MegatronBackend(MegatronOptions(micro_batch_tokens=4096), context(model))
    theirs = FsdpBackend(FsdpOptions(param_dtype="bfloat16", micro_batch_tokens=4096), context(model))
    assert np.abs(ours.log_probs(batch) - theirs.log_probs(batch)).max() < 0.3
    found, expected = ours.train_step(batch).values, theirs.train_step(batch).values
    for name in ("loss", "entropy", "grad_norm"):
        assert found[name] == pytest.approx(expected[name], rel=0.05), name
    ours.close()
    theirs.close()
