"""Llama, Qwen2/Qwen2.5 and Qwen3: grouped-query attention and a gated MLP in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_megatron.architectures.pieces import ATTENTION, ENDS, MLP, NORMS, basics, dense_fields, head_dim, require
from miles_megatron.tables import Architecture, ModelShape

_ROWS = (*ENDS, *NORMS, *ATTENTION, *MLP)


def _describe(config: Mapping[str, Any], **fields: Any) -> ModelShape:
    sliding = config.get("use_sliding_window") and config.get("sliding_window")
    require(not sliding, "full attention in every layer", sliding, "sliding_window")
    width = head_dim(config)
    return ModelShape(
        **basics(config), rotary_dim=width, fields={**dense_fields(config), "kv_channels": width, **fields}
    )


def describe_llama(config: Mapping[str, Any]) -> ModelShape:
    require(not config.get("attention_bias"), "attention_bias: false", True, "attention_bias")
    require(not config.get("mlp_bias"), "mlp_bias: false", True, "mlp_bias")
    return _describe(config)


def describe_qwen2(config: Mapping[str, Any]) -> ModelShape:
    return _describe(config, add_qkv_bias=True)


def describe_qwen3(config: Mapping[str, Any]) -> ModelShape:
    require(not config.get("attention_bias"), "attention_bias: false", True, "attention_bias")
    return _describe(config, qk_layernorm=True)


LLAMA = Architecture(model_types=("llama",), rows=_ROWS, describe=describe_llama)
QWEN2 = Architecture(model_types=("qwen2",), rows=_ROWS, describe=describe_qwen2)
QWEN3 = Architecture(model_types=("qwen3",), rows=_ROWS, describe=describe_qwen3)
