"""What Megatron would compute otherwise than the checkpoint is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import miles_megatron.start  # noqa: F401
from miles_core.errors import ConfigError
from miles_core.testing.tiny import make_tiny_model

from . import scenarios
from .models import HEADS, write_sparse

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0, 3.0, 2.0, 1.5],
    "original_max_position_embeddings": 8,
    "factor": 8.0,
}


def test_a_table_that_depends_on_the_length_is_refused(tmp_path: Path) -> None:
    overrides = {**HEADS, "rope_parameters": LONGROPE}
    make_tiny_model(tmp_path / "m", architecture="llama", layers=2, context=64, overrides=overrides)
    with pytest.raises(ConfigError, match="rope_type: longrope"):
        scenarios.Place(0, 1, tmp_path, "cpu").make("m")


@pytest.mark.parametrize("name", ["qwen3-moe", "glm4-moe", "deepseek-v3"])
def test_one_expert_per_token_whose_weight_is_made_1_is_refused(tmp_path: Path, name: str) -> None:
    write_sparse(tmp_path / "m", name)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": 1}))
    with pytest.raises(ConfigError, match="num_experts_per_tok: 1"):
        scenarios.Place(0, 1, tmp_path, "cpu").make("m")
