"""Put the operators into a Hugging Face model: every module that computes takes its invariant form, or is refused.

Parameters, names and structure stay, so that loading, sharding and updating weights know nothing of it. Attention is
the caller's: engine and trainer keep their keys in different places.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from miles_core.errors import ConfigError
from miles_core.numerics import ops
from miles_core.numerics.profiles import Profile, find_profile, listing

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}


def make_invariant(model: Any, device: torch.device, dtype: torch.dtype) -> Profile:
    """Replace the forward of every computing module of `model`; before it is moved or sharded.

    Args:
        model: A causal LM of transformers.
        device: Where it will compute.
        dtype: In what it will compute.

    Raises:
        ConfigError: the model has no profile, or not one for this device and dtype.
    """
    profile = find_profile(model.config.to_dict())
    if isinstance(profile, str):
        raise refusal(profile)
    kind: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    proven = profile.proven[kind]
    if _DTYPES.get(dtype) not in proven:
        raise refusal(f"profile {profile.name} is proven on {kind} in {' and '.join(proven)}, not in {dtype}")
    for name, module in model.named_modules():
        forward = _forward_of(module)
        if forward is not None:
            module.forward = forward
        elif not any(True for _ in module.children()) and type(module).__name__ not in _EXACT:
            raise refusal(f"module {name} ({type(module).__name__}) has no batch-invariant form")
    return profile


def refusal(found: str) -> ConfigError:
    """True-on-policy never runs with part of its promise."""
    return ConfigError(
        "true-on-policy is not possible with this model",
        expected=f"a registered profile: {listing()}",
        found=found,
        where="precision.true_on_policy",
        do="set precision.true_on_policy: false and bound the difference with a correction, or take a registered model",
    )


_EXACT = frozenset({"Embedding", "SiLUActivation", "SiLU"})
"""Leaf modules that need nothing: a look-up, and the activation that `silu_mul` takes over."""


def _forward_of(module: nn.Module) -> Callable[..., Any] | None:
    match type(module).__name__:
        case "Linear" if getattr(module, "bias", None) is None:
            return partial(_linear, module)
        case "Qwen3RMSNorm":
            return partial(_rms_norm, module)
        case "Qwen3MLP":
            return partial(_mlp, module)
        case "Qwen3RotaryEmbedding":
            return _Rotary(module)
    return None


def _linear(module: Any, x: Tensor) -> Tensor:
    return ops.linear(x, module.weight)


def _rms_norm(module: Any, x: Tensor) -> Tensor:
    return ops.rms_norm(x, module.weight, module.variance_epsilon)


def _mlp(module: Any, x: Tensor) -> Tensor:
    found: Tensor = module.down_proj(ops.silu_mul(module.gate_proj(x), module.up_proj(x)))
    return found


class _Rotary:
    """Cosines and sines looked up in a table made once: computed anew, they would depend on how many there are."""

    def __init__(self, module: Any) -> None:
        angles = (
            np.arange(module.config.max_position_embeddings, dtype=np.float32)[:, None]
            * (module.inv_freq.detach().cpu().float().numpy()[None])
        )
        wide = np.concatenate([angles, angles], axis=-1).astype(np.float64)
        scale = np.float32(module.attention_scaling)
        self._tables = tuple(torch.from_numpy(table(wide).astype(np.float32) * scale) for table in (np.cos, np.sin))
        self._placed: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __call__(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        key = (x.device, x.dtype)
        if key not in self._placed:
            cos, sin = (table.to(device=x.device, dtype=x.dtype) for table in self._tables)
            self._placed[key] = (cos, sin)
        cos, sin = self._placed[key]
        return cos[position_ids], sin[position_ids]
