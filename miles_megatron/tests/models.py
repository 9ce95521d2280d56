"""A tiny random model of every architecture that has a table; four layers, so that pipelines can be cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from miles_core.testing.tiny import Architecture, make_tiny_model
from miles_core.testing.tiny_moe import CONFIGS

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
DENSE: dict[Architecture, dict[str, Any]] = {
    "llama": {"tie": True},
    "qwen2": {"tie": True},
    "qwen3": {"tie": False},
}
SPARSE = ("qwen3-moe", "glm4-moe", "deepseek-v3")


def write_models(folder: Path, *names: str) -> Path:
    """Write the named models, or all, to folders of their names."""
    for name, settings in DENSE.items():
        if not names or name in names:
            overrides = {**HEADS, "rope_parameters": LLAMA3} if name == "llama" else HEADS
            make_tiny_model(folder / name, architecture=name, layers=4, context=64, overrides=overrides, **settings)
    for sparse in SPARSE:
        if not names or sparse in names:
            write_sparse(folder / sparse, sparse)
    return folder


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "original_max_position_embeddings": 16,
}


def write_sparse(folder: Path, name: str, *, seed: int = 1, **changes: Any) -> None:
    """Write a sparse model; `changes` are further fields of its config."""
    config = CONFIGS[name]()
    config.num_hidden_layers = 4
    if name == "deepseek-v3":
        config.rope_parameters = {**YARN}
    if name == "glm4-moe":
        config.use_qk_norm, config.attention_bias = True, True
    for field, value in changes.items():
        setattr(config, field, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
            for key, buffer in model.named_buffers():
                if key.endswith("e_score_correction_bias"):
                    buffer.copy_(0.05 * torch.randn_like(buffer))
    model.save_pretrained(folder)
