"""Peak of live tensor bytes on any device, exact and repeatable, where a CPU offers no allocator statistics."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from miles_core.kinds.backend import Backend, BackendContext, LossSettings, OptimizerSettings
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
        if key in self._known:
            return
        self._known[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.live -= self._known.pop(key, 0)


def peak_of_a_step(make: Callable[[BackendContext], Backend], folder: Path, tokens: int) -> int:
    """Bytes at the peak of one optimizer step on one rank: two micro-batches of `tokens` tokens, four sequences each.

    Memory that loading the model took on the way is not part of it.
    """
    context = BackendContext(
        model_path=str(folder),
        device="cpu",
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
            total_steps=1,
            clip_grad_norm=1.0,
        ),
        loss=LossSettings(load="miles_core.algorithms.losses:ppo_clip"),
        reference=False,
    )
    with LiveBytes() as seen:
        backend = make(context)
        seen.peak = seen.live
        backend.train_step(_batch(tokens))
        peak: int = seen.peak
    backend.close()
    return peak


def _batch(tokens: int) -> TrainBatch:
    lengths = np.full(8, tokens // 4, dtype=np.int64)
    n = int(lengths.sum())
    mask = np.ones(n, dtype=np.bool_)
    mask[:: tokens // 4] = False
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
