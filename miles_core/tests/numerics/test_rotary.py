"""What is said of a config.json's rotary embedding is what transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from miles_core.errors import ConfigError
from miles_core.model_config import read_model_config
from miles_core.numerics.rotary import rope_type, steady_tokens, unreadable
from miles_core.testing.rotary import CONTEXT, ROTATIONS, STEADY, write_rotated

LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}


def table(embedding: Any, tokens: int) -> torch.Tensor:
    cos, sin = embedding(torch.zeros(1), torch.arange(tokens)[None])
    return torch.cat([cos, sin], -1)[0]


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_a_table_is_steady_for_as_many_tokens_as_said_and_no_longer(rotation: str) -> None:
    heads = {"head_dim": 8, "num_attention_heads": 4, "hidden_size": 32, "max_position_embeddings": CONTEXT}
    config = LlamaConfig(**heads, rope_parameters=dict(ROTATIONS[rotation]))
    steady = steady_tokens(config.to_dict())
    assert steady == STEADY[rotation]
    embedding = LlamaRotaryEmbedding(config)
    short, long = table(embedding, 3), table(embedding, steady)
    assert torch.equal(short, long[:3])
    changes = rotation in ("dynamic", "longrope")
    assert torch.equal(table(embedding, steady + 1)[:steady], long) != changes


@pytest.mark.parametrize(
    ("config", "kind", "steady"),
    [
        ({}, "default", None),
        ({"max_position_embeddings": 64, "rope_scaling": None}, "default", 64),
        ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {}}, "linear", None),
        ({"max_position_embeddings": 64, "rope_parameters": LONGROPE}, "longrope", 64),
        (
            {"max_position_embeddings": 64, "original_max_position_embeddings": 8, "rope_scaling": LONGROPE},
            "longrope",
            8,
        ),
        (
            {"max_position_embeddings": 64, "rope_parameters": {"sliding_attention": {}, "full_attention": LONGROPE}},
            "one per layer type",
            64,
        ),
        ({"max_position_embeddings": 64, "rope_scaling": "text"}, "text", 64),
        ({"model_type": "phi3", "rope_scaling": {"type": "su"}, "original_max_position_embeddings": 8}, "longrope", 8),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "yarn"}, "original_max_position_embeddings": 8},
            "longrope",
            8,
        ),
    ],
)
def test_types_and_limits_are_read_under_all_names(config: dict[str, Any], kind: str, steady: int | None) -> None:
    assert rope_type(config) == kind
    assert steady_tokens(config) == steady


@pytest.mark.parametrize(
    ("rope", "missing"),
    [
        ("text", "'text', not an object"),
        (["linear"], "not an object"),
        ({"rope_type": "linear"}, "linear needs a number as factor, not None"),
        ({"rope_type": "dynamic", "factor": "2"}, "dynamic needs a number as factor, not '2'"),
        ({"rope_type": "yarn"}, "yarn needs a number as factor, not None"),
        ({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1}, "high_freq_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 4}, "long_factor"),
        ({"rope_type": "longrope", "short_factor": None, "long_factor": None}, "short_factor"),
        ({"rope_type": "default", "rope_theta": None}, "default needs a number as rope_theta, not None"),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}, None),
        ({"rope_type": "mrope", "mrope_section": [2, 1, 1]}, None),
    ],
)
def test_what_nothing_can_be_computed_from_is_named(tmp_path: Path, rope: Any, missing: str | None) -> None:
    problem = unreadable({"rope_scaling": rope})
    assert problem is None if missing is None else problem is not None and missing in problem
    if missing:
        write_rotated(tmp_path, "linear")
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
        with pytest.raises(ConfigError, match="does not describe a known model"):
            read_model_config(tmp_path)
