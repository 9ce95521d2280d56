"""Whether a model can be cut as the options say: what Megatron would only find out in the middle of a run.

Validation asks with config.json alone, the backend with what its table makes of it. Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miles_core.config.model_folder import EXPERT_COUNTS
from miles_core.errors import ConfigError
from miles_core.numerics.rotary import rope_type
from miles_megatron.options import MegatronOptions

if TYPE_CHECKING:
    from miles_megatron.tables import ModelShape


ROTATIONS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
"""Each one table for all sequences, since none is longer than `steady_tokens`."""
NORMALISED_UNSAID = ("deepseek_v3", "glm4_moe")
"""Whose norm_topk_prob transformers takes for true where config.json leaves it out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """The numbers of a model that a layout must divide; 0 where it has none or nobody says."""

    layers: int
    heads: int
    key_value_heads: int
    """0 for latent attention, which has none to share out."""
    mlp_width: int
    experts: int | None
    """0 for a dense model, None where nobody says."""
    expert_width: int = 0


def cuts_of(shape: ModelShape) -> Cuts:
    """As the architecture's table describes the model."""
    return Cuts(
        layers=shape.layers,
        heads=shape.heads,
        key_value_heads=0 if shape.mla else shape.key_value_heads,
        mlp_width=shape.fields["ffn_hidden_size"],
        experts=shape.experts,
        expert_width=shape.fields.get("moe_ffn_hidden_size", 0),
    )


def cuts_in(config: Mapping[str, Any]) -> Cuts:
    """As config.json names them; an architecture with names of its own is left to its table."""

    def number(*names: str) -> int:
        return next((value for name in names if isinstance(value := config.get(name), int)), 0)

    heads = number("num_attention_heads")
    experts = number(*EXPERT_COUNTS)
    return Cuts(
        layers=number("num_hidden_layers"),
        heads=heads,
        key_value_heads=0 if config.get("kv_lora_rank") else number("num_key_value_heads") or heads,
        mlp_width=number("intermediate_size"),
        experts=None if not experts and any("expert" in name for name in config) else experts,
        expert_width=number("moe_intermediate_size"),
    )


def uncomputed(config: Mapping[str, Any]) -> Iterator[str]:
    """What config.json asks for and Megatron would compute otherwise, each as a sentence."""
    norm = config.get("norm_topk_prob", config.get("model_type") in NORMALISED_UNSAID)
    if config.get("num_experts_per_tok") == 1 and norm:
        yield "norm_topk_prob: true of one expert per token, whose weight Megatron would not make 1"
    if (kind := rope_type(config)) not in ROTATIONS:
        yield f"rope_type: {kind}, where it knows {', '.join(ROTATIONS)}"


def check_fits(shape: ModelShape, options: MegatronOptions) -> None:
    """Raise ConfigError naming everything that does not fit."""
    problems = list(misfits(cuts_of(shape), options))
    if problems:
        raise ConfigError(
            "the model cannot be cut as the backend's options say",
            expected="sizes that divide, and combinations that Megatron computes",
            found="; ".join(found for _, found in problems),
            where=", ".join(dict.fromkeys(path for path, _ in problems)),
            do="change the sizes",
        )


def misfits(cuts: Cuts, options: MegatronOptions) -> Iterator[tuple[str, str]]:
    """Each misfit as the option's path and a sentence."""
    tensor, context = options.tensor_parallel, options.context_parallel
    if cuts.heads % tensor:
        yield "backend.tensor_parallel", f"{cuts.heads} attention heads over {tensor} ranks"
    elif cuts.key_value_heads % tensor:
        yield "backend.tensor_parallel", f"{cuts.key_value_heads} key-value heads over {tensor} ranks"
    elif (cuts.heads // tensor) % context:
        yield "backend.context_parallel", f"{cuts.heads // tensor} heads of each rank over {context} ranks"
    if cuts.mlp_width % tensor:
        yield "backend.tensor_parallel", f"an MLP of width {cuts.mlp_width} over {tensor} ranks"
    pieces = options.pipeline_parallel * options.virtual_pipeline
    if cuts.layers % pieces:
        yield "backend.pipeline_parallel", f"{cuts.layers} layers over {pieces} pieces"
    elif options.recompute == "full" and cuts.layers // pieces % options.recompute_layers:
        held, each = cuts.layers // pieces, options.recompute_layers
        yield "backend.recompute_layers", f"{held} layers of a piece, recomputed {each} at a time"
    if options.virtual_pipeline > 1 and options.pipeline_parallel == 1:
        yield "backend.virtual_pipeline", "a virtual pipeline without a pipeline"
    expert, expert_tensor = options.expert_parallel, options.expert_tensor_parallel
    if not cuts.experts:
        if cuts.experts == 0 and expert * expert_tensor > 1:
            yield "backend.expert_parallel", "a model without experts"
        return
    if cuts.experts % expert:
        yield "backend.expert_parallel", f"{cuts.experts} experts over {expert} ranks"
    if cuts.expert_width % expert_tensor:
        yield "backend.expert_tensor_parallel", f"experts of width {cuts.expert_width} over {expert_tensor} ranks"
    if tensor > 1 and not options.sequence_parallel:
        yield "backend.sequence_parallel", "experts under tensor parallelism without sequence parallelism"
