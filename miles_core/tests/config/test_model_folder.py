"""Reading a checkpoint's figures without its tensors, whatever is in the files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_core.config.model_folder import ModelFolderError, read_model_folder


def header(entries: object) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def folder(tmp_path: Path, weights: bytes, config: str = "{}") -> Path:
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "model.safetensors").write_bytes(weights)
    return tmp_path


ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def test_figures_come_from_config_and_header(tmp_path: Path) -> None:
    config = {
        "architectures": ["SomeForCausalLM"],
        "text_config": {
            "hidden_size": 12,
            "num_attention_heads": 3,
            "num_hidden_layers": 2,
            "max_position_embeddings": 64,
            "vocab_size": 9,
        },
    }
    entries = {"a": ENTRY, "b": {"dtype": "BF16", "shape": [10], "data_offsets": [24, 44]}, "__metadata__": {}}
    found = read_model_folder(folder(tmp_path, header(entries), json.dumps(config)))
    assert (found.parameters, found.stored_bytes) == (16, 6 * 4 + 10 * 2)
    assert (found.layers, found.kv_heads, found.head_dim) == (2, 3, 4)
    assert (found.context_length, found.vocabulary, found.architecture) == (64, 9, "SomeForCausalLM")
    assert found.kv_bytes_per_token(2) == 2 * 2 * 3 * 4 * 2


def test_the_narrowest_weights_are_floating_point(tmp_path: Path) -> None:
    mask = {"dtype": "BOOL", "shape": [4], "data_offsets": [24, 28]}
    assert read_model_folder(folder(tmp_path, header({"a": ENTRY, "mask": mask}))).narrowest_bytes == 4
    half = {"dtype": "BF16", "shape": [2], "data_offsets": [28, 32]}
    assert read_model_folder(folder(tmp_path, header({"a": ENTRY, "mask": mask, "b": half}))).narrowest_bytes == 2


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_experts_are_counted_under_every_name_and_nesting(tmp_path: Path, key: str) -> None:
    weights = header({"a": ENTRY})
    assert read_model_folder(folder(tmp_path, weights, json.dumps({key: 8}))).experts == 8
    assert read_model_folder(folder(tmp_path, weights, json.dumps({"text_config": {key: 8}}))).experts == 8
    assert read_model_folder(folder(tmp_path, weights, json.dumps({"text_config": {}}))).experts is None


def test_what_a_config_does_not_say_is_unknown(tmp_path: Path) -> None:
    found = read_model_folder(folder(tmp_path, header({"a": ENTRY})))
    assert (found.layers, found.context_length, found.kv_bytes_per_token(2)) == (None, None, None)


@pytest.mark.parametrize(
    "weights",
    [
        b"",
        b"\x01",
        b"\xff" * 8,
        (10**9).to_bytes(8, "little") + b"{}",
        (5).to_bytes(8, "little") + b"nope!",
        header([1]),
        header({"a": {"dtype": "F32"}}),
        header({"a": {**ENTRY, "dtype": "F7"}}),
        header({"a": {**ENTRY, "shape": "x"}}),
    ],
)
def test_a_broken_weight_file_is_named(tmp_path: Path, weights: bytes) -> None:
    with pytest.raises(ModelFolderError, match=r"model\.safetensors"):
        read_model_folder(folder(tmp_path, weights))


@pytest.mark.parametrize("config", ["", "[1]", "\x00", '{"rope_scaling": "text"}'])
def test_a_broken_config_is_named(tmp_path: Path, config: str) -> None:
    with pytest.raises(ModelFolderError, match=r"config\.json"):
        read_model_folder(folder(tmp_path, header({"a": ENTRY}), config))


def test_an_index_cannot_reach_out_of_its_folder(tmp_path: Path) -> None:
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes(header({"a": ENTRY}))
    inside = tmp_path / "inside"
    inside.mkdir()
    folder(inside, header({"a": ENTRY}))
    index = {"weight_map": {"a": "../outside.safetensors"}}
    (inside / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFolderError, match="missing"):
        read_model_folder(inside)
