"""A Hugging Face causal LM as the backend uses it: loaded, checked, and turned into a scorer of packed tokens.

The model's own code runs unchanged. Its decoder sees one packed row; its head (with whatever the architecture does to
logits: soft-caps, scales, biases) sees only the positions that are scored, a chunk at a time.

Numerics: the module stays in eval mode, so dropout is off in training too: the policy that is trained is the one that
sampled. Auxiliary MoE losses are part of the model's own `loss`, which is never asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.modeling_utils import AttentionInterface
from transformers.utils import logging as transformers_logging

from miles_core.errors import ConfigError, PluginError
from miles_core.model_config import read_model_config, refuse_quantised
from miles_core.numerics.rotary import steady_tokens
from miles_fsdp.logprobs import Normalise, log_sum_exp, score_hidden
from miles_fsdp.packing import ATTENTION, Packed, packed_attention

AttentionInterface.register(ATTENTION, packed_attention)

_PLAIN_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal LM in its checkpoint's dtype on the CPU, with what must be known before it is cast and sharded."""

    module: Any
    layers: list[nn.Module]
    """Decoder layers, in order."""
    max_positions: int | None
    """Tokens of one sequence at most, or None where the architecture has no limit."""
    attention: str
    """Attention implementation in use."""


def load_model(path: str, attn_implementation: str, param_dtype: torch.dtype) -> LoadedModel:
    """Load the folder's causal LM in its own dtype, in eval mode, on the CPU.

    Args:
        path: Hugging Face folder.
        attn_implementation: As in `FsdpOptions`.
        param_dtype: What the model will compute in; nothing is cast here.

    Raises:
        ConfigError: no such folder, not a causal LM, quantised, or tensors are missing from it.
    """
    config = _read_config(path)
    transformers_logging.disable_progress_bar()
    try:
        module, info = transformers.AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype="auto", local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            "the model cannot be loaded",
            expected="a Hugging Face folder with config.json and complete safetensors",
            found=str(error).splitlines()[0] if str(error) else type(error).__name__,
            where=path,
            do="check model.path",
        ) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ConfigError(
            "the folder is not a complete causal LM",
            expected=f"every weight of {type(module).__name__}",
            found=f"{len(missing)} missing, such as {', '.join(missing[:3])}",
            where=path,
            do="give a causal language model; a classifier or a partial download would train random weights",
        )
    module.eval()
    attention = _choose_attention(module, attn_implementation)
    module.set_attn_implementation(attention)
    if param_dtype == torch.float64 and getattr(module, "_can_set_experts_implementation", lambda: False)():
        module.set_experts_implementation("eager")  # torch's grouped matrix product has no float64
    return LoadedModel(
        module=module,
        layers=_decoder_layers(module),
        max_positions=steady_tokens(config.get_text_config().to_dict()),
        attention=attention,
    )


def checkpoint_dtype(path: str) -> torch.dtype:
    """The dtype a model folder says it is in; float32 where it says nothing.

    Raises:
        ConfigError: it is one that gradients cannot be computed in as they are.
    """
    config = _read_config(path)
    dtype = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None) or torch.float32
    if dtype not in (torch.float32, torch.bfloat16, torch.float64):
        raise ConfigError(
            "the checkpoint's dtype is not one to train in",
            expected="float32, bfloat16 or float64",
            found=str(dtype).removeprefix("torch."),
            where=path,
            do="name one: backend: {use: fsdp, param_dtype: bfloat16}",
        )
    found: torch.dtype = dtype
    return found


def _read_config(path: str) -> Any:
    config = read_model_config(path)
    causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if not causal or config.is_encoder_decoder:
        raise ConfigError(
            "the model is not a causal language model",
            expected="an architecture that AutoModelForCausalLM loads",
            found=f"model_type {config.model_type!r} ({', '.join(config.architectures or ['no architecture'])})",
            where=path,
            do="give a decoder-only language model",
        )
    refuse_quantised(config, path)
    return config


def _choose_attention(module: Any, wanted: str) -> str:
    config = module.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ())
    soft_capped = getattr(config, "attn_logit_softcapping", None) is not None
    fits = (
        getattr(module, "_supports_attention_backend", False)
        and layer_types <= _PLAIN_LAYERS
        and getattr(config, "attention_chunk_size", None) is None
        and not soft_capped
    )
    if wanted == "packed" and not fits:
        raise ConfigError(
            f"attention `packed` does not fit {type(module).__name__}",
            expected="causal or sliding-window softmax attention in every layer",
            found=", ".join(sorted(layer_types - _PLAIN_LAYERS)) or "another form of attention",
            where="backend.attn_implementation",
            do="set backend.attn_implementation: auto",
        )
    if wanted == "auto":
        if fits:
            return ATTENTION
        return "sdpa" if getattr(module, "_supports_sdpa", False) and not soft_capped else "eager"
    return ATTENTION if wanted == "packed" else wanted


def _decoder_layers(module: Any) -> list[nn.Module]:
    """The module list that holds most parameters: it contains every other one."""
    lists: list[nn.Module] = [m for m in module.modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        raise PluginError(
            "the model has no list of layers",
            expected="decoder layers in a torch ModuleList",
            found=type(module).__name__,
            do="use another backend for this architecture",
        )
    return list(max(lists, key=_num_parameters).children())


def _num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def checkpoint_layers(layers: list[nn.Module]) -> None:
    """Recompute each layer in backward. Outside of torch's and transformers' switches, which need training mode."""
    for layer in layers:
        # Forward, not __call__: FSDP's hooks stay outside, so that a recompute does not gather twice.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


# --- scoring ----------------------------------------------------------------------------------------------------------


class _Embeddings(nn.Module):
    """Stands in for a decoder: returns its input as the last hidden state."""

    def forward(self, *, inputs_embeds: Tensor, **_: Any) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)


def head_of(module: Any) -> Callable[[Tensor], Tensor]:
    """The model's own forward with its decoder taken out: hidden f[k, H] -> logits f[k, V].

    A shallow copy shares every submodule and parameter, so it stays right when FSDP swaps them. Call before sharding:
    FSDP changes the class of `module`.
    """
    view = copy.copy(module)
    view._modules = {**module._modules, module.base_model_prefix: _Embeddings()}
    forward = type(module).forward

    def head(hidden: Tensor) -> Tensor:
        logits: Tensor = forward(view, inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0]

    return head


class PackedScorer:
    """``packed -> (log-prob f[K], entropy f[K])``; becomes the module's `forward`, so that FSDP's root hooks apply."""

    def __init__(self, module: Any, chunk_tokens: int, normalise: Normalise = log_sum_exp) -> None:
        self._decoder = module.base_model
        self._head = head_of(module)
        self._chunk_tokens = chunk_tokens
        self._normalise = normalise

    def __call__(self, packed: Packed, *, entropy_grad: bool = False) -> tuple[Tensor, Tensor]:
        out = self._decoder(
            input_ids=packed.token_ids,
            position_ids=packed.position_ids,
            use_cache=False,
            packed_layout=packed.layout,
        )
        hidden = out.last_hidden_state[0]
        count = packed.scored.shape[0]
        # With nothing to score, one position still goes through: every parameter must get a gradient on every rank.
        scored = packed.scored if count else packed.scored.new_zeros(1)
        inverse_temperature = packed.inverse_temperature if count else packed.inverse_temperature.new_ones(1)
        logprobs, entropy = score_hidden(
            self._head,
            hidden.index_select(0, (scored - 1).clamp_min(0)),
            packed.token_ids[0].index_select(0, scored),
            inverse_temperature,
            chunk_tokens=self._chunk_tokens,
            entropy_grad=entropy_grad,
            normalise=self._normalise,
        )
        if count == 0:  # no slice: FSDP hangs its backward hook on the output, and a view could lose it
            return logprobs.index_select(0, packed.scored), entropy.index_select(0, packed.scored)
        return logprobs, entropy
