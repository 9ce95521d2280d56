"""What Megatron would compute otherwise than the checkpoint is refused."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import miles_megatron.start  # noqa: F401
from miles_core.errors import ConfigError
from miles_core.testing.tiny import make_tiny_model
from miles_megatron.fits import uncomputed

from . import scenarios
from .models import HEADS, write_sparse


def test_a_table_that_nobody_compared_is_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "m", architecture="llama", layers=2, context=64, overrides=HEADS)
    rewrite(tmp_path / "m", rope_parameters={"rope_type": "proportional", "rope_theta": 1e4})
    with pytest.raises(ConfigError, match="rope_type: proportional"):
        scenarios.Place(0, 1, tmp_path, "cpu").make("m")


@pytest.mark.parametrize("rope", ["text", {"rope_type": "linear"}, {"rope_type": "yarn", "factor": None}])
def test_parameters_that_nothing_can_be_computed_from_are_refused(tmp_path: Path, rope: Any) -> None:
    write_sparse(tmp_path / "m", "deepseek-v3")
    rewrite(tmp_path / "m", rope_parameters=rope)
    with pytest.raises(ConfigError, match=r"factor|dict"):
        scenarios.Place(0, 1, tmp_path, "cpu").make("m")


def test_a_table_per_layer_type_is_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "m", architecture="qwen3", layers=2, context=64, overrides=HEADS)
    rewrite(
        tmp_path / "m", rope_parameters={"full_attention": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 1e4}
    )
    with pytest.raises(ConfigError, match="rope_type: one per layer type"):
        scenarios.Place(0, 1, tmp_path, "cpu").make("m")


@pytest.mark.parametrize(
    ("name", "norm", "refused"),
    [("qwen3-moe", True, True), ("qwen3-moe", None, False), ("glm4-moe", None, True), ("deepseek-v3", None, True)],
)
def test_one_expert_per_token_whose_weight_is_made_1_is_refused(
    tmp_path: Path, name: str, norm: bool | None, refused: bool
) -> None:
    write_sparse(tmp_path / "m", name)
    config = rewrite(tmp_path / "m", num_experts_per_tok=1, norm_topk_prob=norm)
    assert any("norm_topk_prob" in found for found in uncomputed(config)) == refused
    with pytest.raises(ConfigError, match="num_experts_per_tok: 1") if refused else nullcontext():
        scenarios.Place(0, 1, tmp_path, "cpu").make("m").close()


def rewrite(folder: Path, **changes: Any) -> dict[str, Any]:
    """Change keys of config.json; None leaves one out."""
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if key not in changes or value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return config
