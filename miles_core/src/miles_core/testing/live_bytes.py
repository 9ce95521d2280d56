"""Peak of live tensor bytes on any device, exact and repeatable, where a CPU offers no allocator statistics."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from miles_core.kinds.backend import Backend, BackendContext, LossSettings
from miles_core.testing.backend_oracle import ADAMW
from miles_core.testing.tiny import Architecture, Dtype, make_tiny_model
from miles_core.types import TrainBatch


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operators return while they live; what an operator uses inside itself is not seen.

    Example:
        with LiveBytes() as seen:
            model(tokens).sum().backward()
        seen.peak
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return result

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor made elsewhere, such as a parameter; nothing is counted twice."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or tensor.is_meta:
            return
        self._known[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.live -= self._known.pop(key, 0)


TOKENS, CHUNK = 1024, 256
"""Tokens of a micro-batch, and of those whose logits exist at one time."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model of four layers, which two ranks can share, whose measured step a plan is held against."""

    architecture: Architecture
    dtype: Dtype
    recompute: bool
    hidden: int

    def write(self, folder: Path) -> Path:
        return make_tiny_model(
            folder,
            architecture=self.architecture,
            layers=4,
            hidden=self.hidden,
            vocab=1000,
            context=TOKENS,
            dtype=self.dtype,
            overrides={"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": self.hidden // 4},
        )


CASES = (
    Case("qwen3", "float32", False, 128),
    Case("qwen3", "float32", True, 128),
    Case("qwen3", "bfloat16", False, 128),
    Case("qwen3", "bfloat16", True, 128),
    Case("qwen3-moe", "float32", False, 64),
    Case("llama", "float32", False, 256),
    Case("llama", "bfloat16", False, 256),
)


def peak_of_a_step(
    make: Callable[[BackendContext], Backend], folder: Path, *, rank: int = 0, world: int = 1, micro_batches: int = 2
) -> int:
    """Bytes at the peak of one optimizer step on this rank.

    Memory that loading the model took on the way is not part of it.

    Args:
        micro_batches: Of `TOKENS` tokens and four sequences each, over all ranks.
    """
    context = BackendContext(
        model_path=str(folder),
        device="cpu",
        rank=rank,
        world_size=world,
        seed=0,
        optimizer=replace(ADAMW, clip_grad_norm=1.0),
        loss=LossSettings(load="miles_core.algorithms.losses:ppo_clip"),
        reference=False,
    )
    with LiveBytes() as seen:
        backend = make(context)
        seen.peak = seen.live
        backend.train_step(_batch(4 * micro_batches))
        peak: int = seen.peak
    backend.close()
    return peak


def _batch(sequences: int) -> TrainBatch:
    lengths = np.full(sequences, TOKENS // 4, dtype=np.int64)
    n = int(lengths.sum())
    mask = np.ones(n, dtype=np.bool_)
    mask[:: TOKENS // 4] = False
    ones = np.ones(n, dtype=np.float32)
    return TrainBatch(
        lengths=lengths,
        group_ids=np.arange(sequences, dtype=np.int64),
        rewards=np.zeros(sequences, dtype=np.float32),
        temperatures=np.ones(sequences, dtype=np.float32),
        token_ids=np.random.default_rng(0).integers(3, 900, n).astype(np.int32),
        loss_mask=mask,
        rollout_logprobs=-ones,
        versions=np.zeros(n, dtype=np.int64),
        advantages=ones,
        token_weights=(mask / n).astype(np.float32),
        correction_weights=ones,
        old_logprobs=-ones,
    )
