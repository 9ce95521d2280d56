"""Where a model's parameters are: layer by layer, routed experts and what every tensor-parallel rank holds whole apart,
since parallel layouts divide them differently. Layers for the prediction of further tokens, which checkpoints store
behind the last one and nobody here trains, do not count, nor do buffers that have no gradient.

Read from the headers of the folder's safetensors; from config.json alone, through a model on torch's meta device, where
there are no weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from miles_core.config.model_folder import ModelFolderError, read_config, tensor_shapes

_LAYER = re.compile(r"\.layers\.(\d+)\.")
DTYPES = ("bfloat16", "float16", "float32", "float64")
MAX_LAYERS = 10_000
"""A model is built layer by layer to see its shapes; no architecture has nearly as many."""
_BUFFER = re.compile(r"\.e_score_correction_bias$")
_WHOLE = re.compile(r"norm|\.(?:gate|router)\.|\.(?:q_a|kv_a)_proj|\.kv_a_proj_with_mqa")
"""Norms, routers, and the down-projections of latent attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Parameters (counts, not bytes), and the widths that activations depend on."""

    dense: tuple[int, ...]
    """Of each layer: attention, norms, dense or shared feed-forward, router."""
    experts: tuple[int, ...]
    """Of each layer: routed experts, all of them."""
    whole: tuple[int, ...] = ()
    """Of each layer, and part of `dense`: norms, routers, latent down-projections, which tensor parallelism does not
    divide. Empty means none."""
    embedding: int
    head: int
    """Output projection; 0 when tied to the embedding."""
    other: int = 0
    """Final norm and whatever belongs to no layer."""
    dtype: str = "float32"
    """What config.json says the checkpoint is in, by torch's name."""
    hidden: int
    vocabulary: int
    query_width: int
    key_width: int
    """Keys of one token; values are as wide."""
    normalises_heads: bool = False
    """Queries and keys pass a norm of their own (Qwen3)."""
    ffn_width: int
    """Intermediate features of one token: of all its experts together in a mixture."""
    ffn_copies: int = 0
    """Elements of a token's copies to its experts and of what they return; 0 in a dense model."""

    @property
    def layers(self) -> int:
        return len(self.dense)

    @property
    def total(self) -> int:
        return sum(self.dense) + sum(self.experts) + self.embedding + self.head + self.other


def read_sizes(folder: Path) -> Sizes:
    """Sizes of a Hugging Face folder, with or without weights in it.

    Raises:
        ModelFolderError: config.json is absent or says too little.
    """
    config = read_config(folder)
    has_weights = next(folder.glob("*.safetensors"), None) is not None
    return count(tensor_shapes(folder) if has_weights else _meta_shapes(folder), config)


def count(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, object]) -> Sizes:
    """Sort tensors by their Hugging Face names."""
    numbers = {name: prod(shape) for name, shape in shapes.items()}
    stored = 1 + max((int(found[1]) for name in numbers if (found := _LAYER.search(name))), default=-1)
    if stored == 0:
        raise ModelFolderError("no tensor is called ….layers.<n>.…; its layers cannot be told apart")
    layers = min(stored, _positive(config, "num_hidden_layers") or stored)
    dense, experts, whole = [0] * layers, [0] * layers, [0] * layers
    embedding = head = other = 0
    for name, number in numbers.items():
        if _BUFFER.search(name):
            continue
        if found := _LAYER.search(name):
            layer = int(found[1])
            if layer >= layers:
                continue
            routed = ".experts." in name
            (experts if routed else dense)[layer] += number
            whole[layer] += 0 if routed or not _WHOLE.search(name) else number
        elif "embed" in name:
            embedding += number
        elif "lm_head" in name or name.endswith("output.weight"):
            head += number
        else:
            other += number
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ModelFolderError(f"config.json says dtype {dtype}, not one of {', '.join(DTYPES)}")
    return Sizes(
        dense=tuple(dense),
        experts=tuple(experts),
        whole=tuple(whole),
        dtype=dtype,
        embedding=embedding,
        head=head,
        other=other,
        normalises_heads=any("q_norm" in name for name in numbers),
        **_widths(config, _vocabulary(shapes, config)),
    )


def _widths(config: Mapping[str, object], vocabulary: int) -> dict[str, int]:
    def number(*names: str, default: int | None = None) -> int:
        for name in names:
            if value := _positive(config, name):
                return value
        if default is None:
            raise ModelFolderError(f"config.json has no positive number as {' or '.join(names)}")
        return default

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    head_dim = number("head_dim", "qk_head_dim", default=hidden // heads)
    kv = number("num_key_value_heads", default=heads)
    routed, shared = number("num_experts_per_tok", default=0), number("n_shared_experts", default=0)
    wide = number("moe_intermediate_size", "intermediate_size")
    return {
        "hidden": hidden,
        "vocabulary": vocabulary,
        "query_width": heads * head_dim,
        "key_width": kv * head_dim,
        "ffn_width": (routed + shared) * wide if routed else number("intermediate_size"),
        "ffn_copies": 3 * routed * hidden,  # the token, the expert's output, and that weighted
    }


def _vocabulary(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, object]) -> int:
    rows: Iterable[int] = (shape[0] for name, shape in shapes.items() if "embed" in name and shape)
    found = _positive(config, "vocab_size") or next(iter(rows), 0)
    if not found:
        raise ModelFolderError("config.json has no positive number as vocab_size")
    return found


def _positive(config: Mapping[str, object], name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _meta_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    if (_positive(read_config(folder), "num_hidden_layers") or 0) > MAX_LAYERS:
        raise ModelFolderError(f"config.json: num_hidden_layers is above {MAX_LAYERS}")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # transformers computes with whatever config.json holds
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ModelFolderError(
            f"config.json describes no model to transformers: {type(error).__name__}: {reason}"
        ) from error
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
