"""Tiny random MoE models of the architectures whose routes are recorded and replayed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.18,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = 8
HEADS = {**SIZES, "head_dim": 8}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
GROUPED = {
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}

CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **HEADS, num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True
    ),
    "mixtral": lambda: transformers.MixtralConfig(**HEADS, num_local_experts=EXPERTS, num_experts_per_tok=2),
    "deepseek-v3": lambda: transformers.DeepseekV3Config(**{**SIZES, "num_key_value_heads": 4}, **GROUPED, **LATENT),
    "glm4-moe": lambda: transformers.Glm4MoeConfig(**HEADS, **GROUPED),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **HEADS,
        sliding_window=8,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}
MOE_LAYERS = {"deepseek-v3": 2, "glm4-moe": 2}


def make_model(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
            for key, buffer in model.named_buffers():
                if key.endswith("e_score_correction_bias"):
                    buffer.copy_(0.05 * torch.randn_like(buffer))
    return model.to(dtype).eval()


def save_model(name: str, folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    make_model(name, dtype=dtype, seed=seed).save_pretrained(folder)
    return folder


def chosen_experts(model: Any, token_ids: list[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """i64[T, L, K]: what each layer's experts are asked for in one forward over the whole row."""
    asked: list[torch.Tensor] = []
    modules = [module for module in model.modules() if type(module).__name__.endswith("Experts")]
    hooks = [module.register_forward_pre_hook(lambda _m, args: asked.append(args[1])) for module in modules]
    with torch.no_grad():
        model(input_ids=torch.tensor([token_ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(asked, dim=1).numpy()
