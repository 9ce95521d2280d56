"""Supply what SGLang imports and a CPU-only machine lacks; nothing here computes.

Three gaps, all at import: the kernel package has no CPU wheel (its CPU names are imported whatever the CPU can do, and
called only where AMX kernels exist), torchvision's wheel is linked against CUDA and registers shapes for operators that
then do not exist, and some buffers are pinned in host memory. Import this before sglang, in every process.
"""

from __future__ import annotations

import functools
import importlib.machinery
import os
import sys
import time
import types
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

KERNEL_NAMES = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
)
"""Imported by name under SGLANG_USE_CPU_ENGINE=1. A call is a mistake of this boot, so each one raises."""


def _absent(name: str) -> Callable[..., NoReturn]:
    def call(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} does not exist on this machine")

    return call


def _kernel_module() -> types.ModuleType:
    module = types.ModuleType("sgl_kernel")
    module.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None)
    module.__version__ = "0.0.0"  # type: ignore[attr-defined]
    for name in KERNEL_NAMES:
        setattr(module, name, _absent(name))
    return module


def declare_vision_operators() -> torch.library.Library:
    """Declare the two operators whose shapes torchvision registers at import."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def unpin_route_buffers() -> None:
    """Keep captured routes in plain memory: pinned memory needs an accelerator."""
    from sglang.srt.state_capturer import base

    def make(self: Any, num_tokens: int, num_layers: int, topk_size: int, name: str, device: Any = None) -> None:
        self.buffer = torch.zeros((num_tokens, num_layers, topk_size), dtype=torch.int32)
        self.num_tokens, self.num_layers, self.topk_size, self.name = num_tokens, num_layers, topk_size, name

    base.BaseHostCache.__init__ = make


def unpin_memory() -> None:
    """Let tensors that ask for pinned memory, such as LoRA's offsets, lie in plain memory, for the same reason."""
    for name in ("tensor", "empty", "zeros", "ones", "full"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign,assignment]


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def call(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return make(*args, **kwargs)

    return call


def murmur3(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bits) of seed, position and column; the one kernel that seeded sampling calls.

    Args:
        seed: u64[B]. positions: int[B]. columns: int[V].

    Returns:
        u32[B, V]
    """
    rows = np.asarray(seed.view(torch.int64).numpy()).view(np.uint64)
    mask = np.uint64(0xFFFFFFFF)
    blocks = [
        (rows & mask).astype(np.uint32)[:, None],
        (rows >> np.uint64(32)).astype(np.uint32)[:, None],
        positions.numpy().astype(np.uint32)[:, None],
        columns.numpy().astype(np.uint32)[None, :],
    ]
    state = np.zeros((1, 1), dtype=np.uint32)
    for block in blocks:
        mixed = _rotated(block * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
        state = _rotated(state ^ mixed, 13) * np.uint32(5) + np.uint32(0xE6546B64)
    state = state ^ np.uint32(16)  # bytes hashed
    state = (state ^ (state >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    state = (state ^ (state >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return torch.from_numpy(state ^ (state >> np.uint32(16)))


def _rotated(words: npt.NDArray[np.uint32], bits: int) -> npt.NDArray[np.uint32]:
    return (words << np.uint32(bits)) | (words >> np.uint32(32 - bits))


def define_seed_kernel() -> torch.library.Library:
    """The operator's name in SGLang's own namespace; no other is defined there, which keeps every layer on torch."""
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
    library.impl("murmur_hash32_cpu", murmur3, "CPU")
    return library


def allow_seeds() -> None:
    """Admit torch's attention to deterministic mode: with one thread it has no batch-dependent kernel to replace."""
    try:
        from sglang.srt.arg_groups import choices
    except ImportError:  # 0.5.17
        from sglang.srt import server_args as choices
    from sglang.srt.model_executor.model_runner import ModelRunner

    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    ModelRunner.maybe_enable_batch_invariant_mode = lambda self: None


def take_time(seconds: float) -> None:
    """Let every step last a while: a tiny model is done before a busy test can interrupt it."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    forward = ModelRunner.forward

    def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return forward(self, *args, **kwargs)

    ModelRunner.forward = slow


_LIBRARIES = (None if hasattr(torch.ops.torchvision, "nms") else declare_vision_operators(), define_seed_kernel())
sys.modules.setdefault("sgl_kernel", _kernel_module())
unpin_route_buffers()
unpin_memory()
allow_seeds()
if "SGLANG_CPU_STEP_S" in os.environ:
    take_time(float(os.environ["SGLANG_CPU_STEP_S"]))
