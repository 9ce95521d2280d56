"""What folders are accepted, that heads keep what their architecture does to logits, and plug-in manners."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma2Config, GraniteConfig

from miles_core.errors import ConfigError
from miles_core.testing.backend_oracle import example_batch
from miles_core.testing.tiny import make_tiny_model
from miles_fsdp.export import Exporter
from miles_fsdp.model import PackedScorer, checkpoint_dtype, load_model
from miles_fsdp.packing import ATTENTION, pack

SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "initializer_range": 0.5,
}


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def drop_a_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "cannot be loaded"),
    "half weights": (lambda folder: (folder / "model.safetensors").write_bytes(b"\x10\0\0"), "cannot be loaded"),
    "a weight missing": (drop_a_weight, r"model\.norm\.weight"),
    "unknown type": (lambda folder: change_config(folder, model_type="nonesuch"), "known model"),
    "encoder-decoder": (lambda folder: change_config(folder, model_type="t5"), "causal language model"),
    "image model": (lambda folder: change_config(folder, model_type="vit"), "causal language model"),
    "quantised": (
        lambda folder: change_config(folder, quantization_config={"quant_method": "fp8"}),
        "quantised",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_unusable_folders_are_refused_with_four_parts(tmp_path: Path, case: str) -> None:
    damage, words = BROKEN[case]
    make_tiny_model(tmp_path)
    damage(tmp_path)
    with pytest.raises(ConfigError, match=words) as raised:
        load_model(str(tmp_path), "auto", torch.float32)
    assert raised.value.expected
    assert raised.value.found
    assert raised.value.where == str(tmp_path)
    assert raised.value.do


@pytest.mark.parametrize(
    ("config", "attention"),
    [
        (Gemma2Config(**SMALL, final_logit_softcapping=2.0, sliding_window=4), "eager"),
        (GraniteConfig(**SMALL, logits_scaling=4.0, embedding_multiplier=3.0), ATTENTION),
    ],
)
def test_heads_keep_soft_caps_and_scales(tmp_path: Path, config: Any, attention: str) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), "auto", torch.float32)
    assert loaded.attention == attention
    batch = example_batch(np.random.default_rng(0), (9,), temperatures=(1.0,))
    scored = pack(batch, torch.device("cpu"))
    with torch.no_grad():
        ids = torch.from_numpy(batch.token_ids.astype(np.int64))[None]
        plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
        expected = plain(ids).logits[0].log_softmax(-1)
        found, _ = PackedScorer(loaded.module, chunk_tokens=2)(scored)
    at = scored.scored
    assert torch.allclose(found, expected[at - 1, ids[0, at]], rtol=0, atol=1e-4)


def test_attention_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Gemma2Config(**SMALL), dtype=torch.float32).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="does not fit"):
        load_model(str(tmp_path), "packed", torch.float32)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "qwen3-moe"])
@pytest.mark.parametrize("tie", [True, False])
def test_exported_names_shapes_and_dtypes_are_the_checkpoints(tmp_path: Path, architecture: Any, tie: bool) -> None:
    make_tiny_model(tmp_path, architecture=architecture, tie=tie, dtype="bfloat16")
    expected = load_file(tmp_path / "model.safetensors")
    module = load_model(str(tmp_path), "auto", torch.float32).module
    exporter = Exporter(module, None)
    assert {name: (e.shape, e.dtype) for name, e in exporter.tensors.items()} == {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in expected.items()
    }
    live = dict(module.named_parameters()) | dict(module.named_buffers())
    for bucket in exporter.buckets(live, version=0, bucket_bytes=4096):
        for named in bucket.tensors:
            assert torch.equal(named.tensor, expected[named.name]), named.name


@pytest.mark.parametrize(("stored", "computed"), [("bfloat16", torch.bfloat16), ("float32", torch.float32)])
def test_compute_follows_the_checkpoint_unless_named(tmp_path: Path, stored: Any, computed: torch.dtype) -> None:
    assert checkpoint_dtype(str(make_tiny_model(tmp_path / "model", dtype=stored))) == computed


def test_a_half_precision_checkpoint_needs_a_named_dtype(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not one to train in"):
        checkpoint_dtype(str(make_tiny_model(tmp_path / "model", dtype="float16")))


def test_an_export_dtype_applies_to_every_floating_tensor(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, dtype="float32")
    exporter = Exporter(load_model(str(tmp_path), "auto", torch.float32).module, torch.bfloat16)
    assert {e.dtype for e in exporter.tensors.values()} == {torch.bfloat16}


def test_listing_the_plugin_imports_nothing_heavy() -> None:
    code = (
        "import sys, miles_fsdp.plugin, miles_fsdp.options; miles_fsdp.plugin.miles_backends();"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
