"""For which models true-on-policy is proven, and the contract between engine and trainer that it expands into.

Plain data over the standard library: validation and the plan read it before torch is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from miles_core.numerics.rotary import rope_type

RULES: tuple[tuple[str, str], ...] = (
    ("matrix products", "fixed tiles, K summed in one order; a row's result depends on the row and the weight alone"),
    ("attention", "one kernel for prefill and decode: blocks of fixed size from position 0, in order, online softmax"),
    ("normalisation", "RMSNorm with one row's sum in one order, float32, rounded before the weight"),
    ("elementwise", "rotary tables per position; SiLU times gate in float32, rounded once; no other fusion"),
    ("log-probs", "float32 logits over temperature less a log-sum-exp over the whole vocabulary in one order"),
    ("dtype", "engine and trainer compute in the checkpoint's dtype; the published weights are its exact values"),
)
"""What engine and trainer agree on: (what, how)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A shape of model for which engine and trainer were shown to give identical log-probs."""

    name: str
    model_type: str
    """As config.json says it."""
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    proven: Mapping[Literal["cpu", "cuda"], tuple[str, ...]]
    """Safetensors dtypes per kind of device."""

    def __str__(self) -> str:
        return (
            f"{self.name} ({self.model_type}, {self.num_hidden_layers} layers of {self.hidden_size}, "
            f"{self.num_attention_heads}/{self.num_key_value_heads} heads of {self.head_dim})"
        )


_BOTH: Mapping[Literal["cpu", "cuda"], tuple[str, ...]] = {"cpu": ("F32", "BF16"), "cuda": ("BF16",)}

PROFILES: tuple[Profile, ...] = (
    Profile(
        name="qwen3-0.6b",
        model_type="qwen3",
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        proven=_BOTH,
    ),
    Profile(
        name="qwen3-4b",
        model_type="qwen3",
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        proven=_BOTH,
    ),
    Profile(
        name="qwen3-tiny",
        model_type="qwen3",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        proven=_BOTH,
    ),
)
"""Dense Qwen3 of 0.6 and 4 billion parameters (base and instruction-tuned share a shape), and a tiny one for tests."""

_SHAPE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


def find_profile(config: Mapping[str, Any]) -> Profile | str:
    """The profile of a config.json, or why there is none.

    Args:
        config: The parsed config.json, in either of transformers' ways to write rotary parameters.
    """
    for profile in PROFILES:
        if config.get("model_type") == profile.model_type and all(config.get(k) == getattr(profile, k) for k in _SHAPE):
            return _plain(config) or profile
    shape = ", ".join(f"{key} {config.get(key)}" for key in _SHAPE)
    return f"no profile has the shape of this model ({config.get('model_type')}: {shape})"


def _plain(config: Mapping[str, Any]) -> str | None:
    """What in a config of a registered shape lies outside the proof."""
    if (kind := rope_type(config)) != "default":
        return f"its rotary embedding is of type {kind}, not default"
    if config.get("hidden_act", "silu") != "silu":
        return f"its activation is {config['hidden_act']}, not silu"
    for key in ("attention_bias", "use_sliding_window"):
        if config.get(key):
            return f"it sets {key}"
    if config.get("quantization_config"):
        return "it is quantised"
    return None


def listing() -> str:
    """The registered profiles, for a message."""
    return "; ".join(str(profile) for profile in PROFILES)
