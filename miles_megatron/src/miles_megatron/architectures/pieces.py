"""Rows and config fields that architectures have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_core.errors import ConfigError
from miles_core.numerics.rotary import steady_tokens
from miles_megatron.layouts import (
    COLUMNS,
    EXPERT_DOWN,
    EXPERT_GATE_UP,
    GATE_UP,
    QKV,
    REPLICATED,
    ROWS,
    VOCAB,
)
from miles_megatron.tables import Row, layer_rows

ENDS = (
    Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), VOCAB),
    Row("decoder.final_layernorm.weight", ("model.norm.weight",), REPLICATED),
    Row("output_layer.weight", ("lm_head.weight",), VOCAB),
)

NORMS = layer_rows(
    "",
    "",
    (
        ("input_layernorm.weight", "input_layernorm.weight", REPLICATED),
        ("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", REPLICATED),
    ),
)

ATTENTION = layer_rows(
    "self_attention.",
    "self_attn.",
    (
        ("linear_qkv.weight", ("q_proj.weight", "k_proj.weight", "v_proj.weight"), QKV),
        ("linear_qkv.bias", ("q_proj.bias", "k_proj.bias", "v_proj.bias"), QKV),
        ("linear_proj.weight", "o_proj.weight", COLUMNS),
        ("q_layernorm.weight", "q_norm.weight", REPLICATED),
        ("k_layernorm.weight", "k_norm.weight", REPLICATED),
    ),
)

LATENT_ATTENTION = layer_rows(
    "self_attention.",
    "self_attn.",
    (
        ("linear_q_proj.weight", "q_proj.weight", ROWS),
        ("linear_q_down_proj.weight", "q_a_proj.weight", REPLICATED),
        ("q_layernorm.weight", "q_a_layernorm.weight", REPLICATED),
        ("linear_q_up_proj.weight", "q_b_proj.weight", ROWS),
        ("linear_kv_down_proj.weight", "kv_a_proj_with_mqa.weight", REPLICATED),
        ("kv_layernorm.weight", "kv_a_layernorm.weight", REPLICATED),
        ("linear_kv_up_proj.weight", "kv_b_proj.weight", ROWS),
        ("linear_proj.weight", "o_proj.weight", COLUMNS),
    ),
)

MLP = layer_rows(
    "mlp.",
    "mlp.",
    (
        ("linear_fc1.weight", ("gate_proj.weight", "up_proj.weight"), GATE_UP),
        ("linear_fc2.weight", "down_proj.weight", COLUMNS),
    ),
)

EXPERTS = layer_rows(
    "mlp.",
    "mlp.",
    (
        ("router.weight", "gate.weight", REPLICATED),
        (
            "experts.gate_up",
            ("experts.{expert}.gate_proj.weight", "experts.{expert}.up_proj.weight"),
            EXPERT_GATE_UP,
        ),
        ("experts.down", "experts.{expert}.down_proj.weight", EXPERT_DOWN),
    ),
)

CHOICE_BIAS = (
    Row(
        "decoder.layers.{layer}.mlp.router.expert_bias",
        ("model.layers.{layer}.mlp.gate.e_score_correction_bias",),
        REPLICATED,
        trained=False,
    ),
)
"""Added to scores where experts are chosen, not where they are weighted."""

SHARED_EXPERTS = layer_rows(
    "mlp.shared_experts.",
    "mlp.shared_experts.",
    (
        ("linear_fc1.weight", ("gate_proj.weight", "up_proj.weight"), GATE_UP),
        ("linear_fc2.weight", "down_proj.weight", COLUMNS),
    ),
)


def basics(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `ModelShape` that every config names alike."""
    return {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "key_value_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "vocab": config["vocab_size"],
        "max_positions": steady_tokens(config) or config["max_position_embeddings"],
        "padding_token": config.get("pad_token_id"),
        "tied": bool(config.get("tie_word_embeddings")),
    }


def dense_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of Megatron's config for RMSNorm, a gated SiLU MLP and no biases but those of the architecture."""
    require(config.get("hidden_act") == "silu", "hidden_act: silu", config.get("hidden_act"), "hidden_act")
    return {
        "ffn_hidden_size": config["intermediate_size"],
        "layernorm_epsilon": config["rms_norm_eps"],
    }


def head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def softmax_router(config: Mapping[str, Any]) -> dict[str, Any]:
    """Softmax over all experts, top-k of it, renormalised or not."""
    _require_several(config)
    return {
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_router_score_function": "softmax",
        # Softmax over the chosen equals the chosen of a softmax, renormalised.
        "moe_router_pre_softmax": not config.get("norm_topk_prob"),
    }


def sigmoid_router(config: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSeek-V3's router: sigmoid scores in float32, a bias that only chooses, groups, a factor."""
    require(bool(config.get("norm_topk_prob", True)), "norm_topk_prob: true", False, "norm_topk_prob")
    _require_several(config)
    groups = config.get("n_group") or 1
    return {
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": config["moe_intermediate_size"] * config["n_shared_experts"],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": config["routed_scaling_factor"],
        "moe_router_dtype": "fp32",
        **({"moe_router_num_groups": groups, "moe_router_group_topk": config["topk_group"]} if groups > 1 else {}),
    }


def _require_several(config: Mapping[str, Any]) -> None:
    """Megatron renormalises the weights of several experts only; that of a single one stays what its router says."""
    alone = config["num_experts_per_tok"] == 1 and config.get("norm_topk_prob", True)
    require(not alone, "several experts per token, or norm_topk_prob: false", 1, "num_experts_per_tok")


def require(holds: bool, expected: str, found: object, where: str) -> None:
    """Refuse a config that the tables do not describe.

    Raises:
        ConfigError
    """
    if not holds:
        raise ConfigError(
            "Megatron does not compute this architecture as its checkpoint does",
            expected=expected,
            found=f"{where}: {found}",
            where="config.json",
            do="use backend fsdp",
        )
