"""Tables: what they refuse, and how a third party brings its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import miles_megatron.start  # noqa: F401
from miles_core.errors import ConfigError
from miles_core.testing.backend import weights
from miles_core.testing.tiny import make_tiny_model
from miles_megatron.architectures.dense import LLAMA
from miles_megatron.tables import Architecture, Table

from . import scenarios

MINE = Architecture(model_types=("llama",), rows=LLAMA.rows, describe=LLAMA.describe)
ANOTHERS = Architecture(model_types=("qwen3",), rows=LLAMA.rows, describe=LLAMA.describe)
HERE = scenarios.Place(0, 1, Path(), "cpu")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "llama", architecture="llama", context=64)


def test_names_are_found_in_both_directions() -> None:
    table = Table(LLAMA)
    piece = table.find("model.layers.12.self_attn.k_proj.weight")
    assert piece is not None
    assert piece.layer == 12
    assert table.tensors(piece)[1] == "model.layers.12.self_attn.k_proj.weight"
    ((row, layer),) = table.rows_of("decoder.layers.12.self_attention.linear_qkv.weight")
    assert (row, layer) == (piece.row, 12)
    assert table.find("model.layers.1.self_attn.rotary.inv_freq") is None


def test_a_named_table_is_used_and_a_wrong_one_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = scenarios.Place(0, 1, model.parent, "cpu")
    made = place.make("llama", changes={"architecture": f"{__name__}:MINE"})
    exported = weights(made)
    made.close()
    for name, tensor in load_file(model / "model.safetensors").items():
        assert torch.equal(exported[name], tensor), name
    with pytest.raises(ConfigError, match="does not map this checkpoint"):
        place.make("llama", changes={"architecture": f"{__name__}:ANOTHERS"})


def test_an_unmapped_architecture_is_refused(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "gemma"}))
    with pytest.raises(ConfigError, match="no table maps"):
        scenarios.Place(0, 1, model.parent, "cpu").make("llama")


@pytest.mark.parametrize("what", ["extra", "missing", "half"])
def test_a_folder_that_does_not_fit_the_table_is_refused(model: Path, what: str) -> None:
    tensors = load_file(model / "model.safetensors")
    if what == "extra":
        tensors["model.layers.0.self_attn.sinks"] = torch.zeros(2)
    elif what == "missing":
        del tensors["model.layers.1.mlp.down_proj.weight"]
    else:
        del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(ConfigError, match="does not fit"):
        scenarios.Place(0, 1, model.parent, "cpu").make("llama")


def test_a_model_that_cannot_be_cut_is_refused_with_the_numbers(model: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be cut") as raised:
        scenarios.Place(0, 1, model.parent, "cpu").make("llama", virtual_pipeline=2, expert_parallel=1)
    assert raised.value.where == "backend.virtual_pipeline"
