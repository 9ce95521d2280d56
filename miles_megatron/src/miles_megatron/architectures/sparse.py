"""Qwen3-MoE, GLM-4.5/4.7 and DeepSeek-V3: mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_megatron.architectures.pieces import (
    ATTENTION,
    CHOICE_BIAS,
    ENDS,
    EXPERTS,
    LATENT_ATTENTION,
    MLP,
    NORMS,
    SHARED_EXPERTS,
    basics,
    dense_fields,
    head_dim,
    require,
    sigmoid_router,
    softmax_router,
)
from miles_megatron.tables import Architecture, ModelShape

_NEXT_TOKEN_LAYERS = r"model\.layers\.\d+\.(?:embed_tokens|enorm|hnorm|eh_proj|shared_head)\..*"
"""What only a multi-token-prediction layer has; such a layer follows the last one and serves speculative decoding."""


def describe_qwen3_moe(config: Mapping[str, Any]) -> ModelShape:
    require(not config.get("attention_bias"), "attention_bias: false", True, "attention_bias")
    sliding = config.get("use_sliding_window") and config.get("sliding_window")
    require(not sliding, "full attention in every layer", sliding, "sliding_window")
    width = head_dim(config)
    step, dense = config["decoder_sparse_step"], config.get("mlp_only_layers") or []
    layers = range(config["num_hidden_layers"])
    return ModelShape(
        **basics(config),
        rotary_dim=width,
        experts=config["num_experts"],
        experts_per_token=config["num_experts_per_tok"],
        sparse_layers=frozenset(n for n in layers if n not in dense and (n + 1) % step == 0),
        fields={**dense_fields(config), **softmax_router(config), "kv_channels": width, "qk_layernorm": True},
    )


def _first_dense(config: Mapping[str, Any]) -> dict[str, Any]:
    first = config["first_k_dense_replace"]
    return {
        "experts": config["n_routed_experts"],
        "experts_per_token": config["num_experts_per_tok"],
        "sparse_layers": frozenset(range(first, config["num_hidden_layers"])),
    }


def describe_glm4_moe(config: Mapping[str, Any]) -> ModelShape:
    width = head_dim(config)
    partial = (config.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0)
    return ModelShape(
        **basics(config),
        **_first_dense(config),
        rotary_dim=int(width * partial),
        fields={
            **dense_fields(config),
            **sigmoid_router(config),
            "kv_channels": width,
            "add_qkv_bias": bool(config.get("attention_bias")),
            "qk_layernorm": bool(config.get("use_qk_norm")),
        },
    )


def describe_deepseek_v3(config: Mapping[str, Any]) -> ModelShape:
    require(not config.get("attention_bias"), "attention_bias: false", True, "attention_bias")
    require(bool(config.get("rope_interleave", True)), "rope_interleave: true", False, "rope_interleave")
    rope = config.get("rope_parameters") or {}
    scaled = rope.get("rope_type", "default") != "default"
    require(not scaled or rope.get("factor") is not None, "a factor of rope_parameters", None, "factor")
    return ModelShape(
        **basics(config),
        **_first_dense(config),
        rotary_dim=config["qk_rope_head_dim"],
        mla=True,
        fields={
            **dense_fields(config),
            **sigmoid_router(config),
            "q_lora_rank": config["q_lora_rank"],
            "kv_lora_rank": config["kv_lora_rank"],
            "qk_head_dim": config["qk_nope_head_dim"],
            "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
            "v_head_dim": config["v_head_dim"],
            "qk_layernorm": True,
            # Only the scale of the softmax comes from these; rotation tables are the checkpoint's own.
            "rotary_scaling_factor": float(rope.get("factor", 1.0)) if scaled else 1.0,
            "mscale": float(rope.get("mscale") or 1.0),
            "mscale_all_dim": float(rope.get("mscale_all_dim") or 0.0),
        },
    )


QWEN3_MOE = Architecture(
    model_types=("qwen3_moe",), rows=(*ENDS, *NORMS, *ATTENTION, *MLP, *EXPERTS), describe=describe_qwen3_moe
)
GLM4_MOE = Architecture(
    model_types=("glm4_moe",),
    rows=(*ENDS, *NORMS, *ATTENTION, *MLP, *EXPERTS, *CHOICE_BIAS, *SHARED_EXPERTS),
    describe=describe_glm4_moe,
    left_out=(_NEXT_TOKEN_LAYERS,),
)
DEEPSEEK_V3 = Architecture(
    model_types=("deepseek_v3",),
    rows=(*ENDS, *NORMS, *LATENT_ATTENTION, *MLP, *EXPERTS, *CHOICE_BIAS, *SHARED_EXPERTS),
    describe=describe_deepseek_v3,
    left_out=(_NEXT_TOKEN_LAYERS,),
)
