"""Models whose rotary embedding was trained on 16 tokens and is stretched to a context of 64, of every type.

`expected_update` of `backend_oracle` and `logprobs_of` of `engine_oracle` say what transformers computes of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from miles_core.testing.backend_oracle import example_batch
from miles_core.testing.tiny import Architecture, make_tiny_model
from miles_core.types import TrainBatch

ORIGINAL, CONTEXT = 16, 64
_BASE = {"rope_theta": 100.0}  # so low that the slowest dimension turns visibly within the context, too
_STRETCHED = {**_BASE, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
_PAIRS = 4
"""Rotated pairs of dimensions of a head."""

ROTATIONS: dict[str, dict[str, Any]] = {
    "linear": {**_BASE, "rope_type": "linear", "factor": 4.0},
    "dynamic": {**_BASE, "rope_type": "dynamic", "factor": 4.0},
    "yarn": {**_STRETCHED, "rope_type": "yarn", "beta_fast": 4.0},
    "llama3": {**_STRETCHED, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {
        **_STRETCHED,
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * n for n in range(_PAIRS)],
        "long_factor": [4.0 - 0.3 * n for n in range(_PAIRS)],
    },
}
"""``rope_parameters`` by type, for heads of 8 rotated dimensions."""
STEADY = {name: ORIGINAL if name == "longrope" else CONTEXT for name in ROTATIONS}
"""Tokens of the longest sequence that is rotated as each of its parts, and as in a batch of other ones."""


def write_rotated(folder: Path, rotation: str, architecture: Architecture = "llama") -> Path:
    """A tiny model with 4 heads of 8 dimensions."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2 * _PAIRS}
    overrides = {**heads, "rope_parameters": dict(ROTATIONS[rotation])}
    return make_tiny_model(folder, architecture=architecture, context=CONTEXT, overrides=overrides)


def long_and_short(longest: int) -> TrainBatch:
    """Sequences from a few tokens to `longest`, which one packed row may hold together."""
    return example_batch(np.random.default_rng(7), (5, longest, longest // 2, longest - 1, 7))
