"""Build this rank's pieces of the model from a table's shape: Megatron's GPTModel with a head that scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from miles_core.errors import ConfigError
from miles_core.numerics.rotary import rope_type
from miles_megatron.exchange import gather_scored
from miles_megatron.fits import ROTATIONS
from miles_megatron.groups import Layout
from miles_megatron.modules import Experts, Norm, PackedAttention, Rotation, SameEverywhere
from miles_megatron.options import MegatronOptions
from miles_megatron.packed import Packed
from miles_megatron.replay import Layer, Replay, replay_of
from miles_megatron.scoring import score_hidden
from miles_megatron.tables import ModelShape


@dataclass(frozen=True, slots=True)
class Blueprint:
    """Everything that decides how the model is built."""

    shape: ModelShape
    checkpoint_config: Any
    """transformers' config object; its rotation table is used."""
    layout: Layout
    options: MegatronOptions
    dtype: torch.dtype
    device: torch.device


def megatron_config(plan: Blueprint) -> TransformerConfig:
    """Megatron's config: the shape, the layout, and every source of randomness or auxiliary loss switched off."""
    shape, layout, options = plan.shape, plan.layout, plan.options
    fields: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.key_value_heads,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        # The policy that is trained is the one that sampled.
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": plan.dtype,
        "pipeline_dtype": plan.dtype,
        "bf16": plan.dtype == torch.bfloat16,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual if layout.virtual > 1 else None,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "sequence_parallel": options.sequence_parallel,
        "perform_initialization": False,
        "use_cpu_initialization": plan.device.type == "cpu",
        # Weights of tokens hold every denominator: gradients are sums over micro-batches and ranks.
        "calculate_per_token_loss": True,
        # Packed rows differ in length, so stages tell each other what they send; interleaved ones cannot.
        "variable_seq_lengths": layout.virtual == 1,
        # The other dispatcher wants equally many tokens on each rank.
        "moe_token_dispatcher_type": "alltoall",
        # Interleaved stages send both ways between the same two ranks; in one batch, messages would be mixed up.
        "overlap_p2p_comm": layout.virtual > 1,
        "batch_p2p_comm": layout.virtual == 1,
        "batch_p2p_sync": False,
        # A CPU has no stream that would keep a tensor alive until it is sent.
        "deallocate_pipeline_outputs": plan.device.type != "cpu",
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "cuda_graph_scope": [],
        **_expert_fields(plan),
        **shape.fields,
    }
    if options.recompute == "full":
        fields |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": options.recompute_layers,
        }
    if shape.mla:
        return MLATransformerConfig(**fields, multi_latent_attention=True, rope_type="rope")
    config = TransformerConfig(**fields)
    _, scale = rotation_table(plan)
    if scale != 1.0:
        # By these, meant for YaRN, Megatron multiplies rotated dimensions, and no others, by 0.1 mscale ln(factor) + 1.
        config.yarn_rotary_scaling_factor, config.yarn_mscale, config.yarn_mscale_all_dim = math.e, 10 * (scale - 1), 0
    return config


def _expert_fields(plan: Blueprint) -> dict[str, Any]:
    if not plan.shape.experts:
        return {}
    return {
        "num_moe_experts": plan.shape.experts,
        "moe_router_topk": plan.shape.experts_per_token,
        "moe_layer_freq": [int(n in plan.shape.sparse_layers) for n in range(plan.shape.layers)],
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        # Megatron moves the router's bias after each step unless the rate is 0; here only the loss moves the policy.
        "moe_router_bias_update_rate": 0.0,
    }


def rotation_table(plan: Blueprint) -> tuple[Tensor, float]:
    """Inverse frequencies f32[rotated / 2] and the scale of rotated vectors, as transformers computes them.

    Raises:
        ConfigError: nobody compared the table with that of transformers.
    """
    config = plan.checkpoint_config
    rope = dict(getattr(config, "rope_parameters", None) or {})
    kind = rope_type({"rope_parameters": rope})
    if kind not in ROTATIONS:
        raise ConfigError(
            "Megatron does not compute this rotary embedding as its checkpoint does",
            expected="rope_type " + ", ".join(ROTATIONS),
            found=f"rope_type: {kind}",
            where="config.json",
            do="use backend fsdp",
        )
    if kind != "default":
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, device=torch.device("cpu"))
        return frequencies, float(scale)
    steps = torch.arange(0, plan.shape.rotary_dim, 2, dtype=torch.int64).float()
    return 1.0 / (rope["rope_theta"] ** (steps / plan.shape.rotary_dim)), 1.0


def layer_spec(config: TransformerConfig, *, sparse: bool) -> ModuleSpec:
    """Megatron's own layer without TransformerEngine, with our norm, attention core and experts."""
    latent = config.multi_latent_attention
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if sparse else None,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=latent,
        normalization="RMSNorm",
    )
    spec.module = Layer
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = Norm
        if latent:
            attention.kv_layernorm = Norm
        else:
            attention.k_layernorm = Norm
    if sparse:
        parts.mlp.submodules.experts = ModuleSpec(module=Experts)
    else:
        parts.mlp.params = {"ffn_hidden_size": config.ffn_hidden_size}
    return spec


class ScoringModel(GPTModel):  # type: ignore[misc]
    """A GPTModel whose last stage returns log-prob and entropy of the scored positions."""

    scoring: Mapping[str, int]
    """`vocab` and `chunk_tokens`."""
    padding_token: int | None
    """Its row of the input embedding gets no gradient."""

    def _preprocess(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        hidden, *rest = super()._preprocess(input_ids, *args, **kwargs)
        if self.pre_process and self.padding_token is not None and torch.is_grad_enabled():
            untrained = input_ids[0] == self.padding_token
            if self.config.sequence_parallel:
                group = self.pg_collection.tp
                untrained = untrained.chunk(group.size())[group.rank()]
            hidden = torch.where(untrained[:, None, None], hidden.detach(), hidden)
        return (hidden, *rest)

    def _postprocess(self, hidden_states: Tensor, *, packed_seq_params: Packed, **_: Any) -> Any:
        """(f32[K], f32[K]) on the last stage, complete on each rank; hidden states elsewhere."""
        if not self.post_process:
            return hidden_states
        packed = packed_seq_params
        assert packed.scored is not None
        assert packed.targets is not None
        assert packed.inverse_temperature is not None
        groups: Any = self.pg_collection
        hidden = hidden_states
        if self.config.sequence_parallel:
            # Every rank goes on with the whole sequence and the same gradient, so each takes its own part back.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        at = packed.scored - 1 - packed.start
        mine = ((at >= 0) & (at < hidden.shape[0])).nonzero()[:, 0]
        logprobs, entropy = score_hidden(
            hidden[:, 0].index_select(0, at.index_select(0, mine)),
            self.output_layer.weight if weight is None else weight,
            packed.targets.index_select(0, mine),
            packed.inverse_temperature.index_select(0, mine),
            vocab=self.scoring["vocab"],
            group=groups.tp,
            chunk_tokens=self.scoring["chunk_tokens"],
            entropy_grad=packed.entropy_grad,
        )
        if groups.cp.size() > 1:
            blank = logprobs.new_zeros(packed.scored.shape[0])
            logprobs = gather_scored(blank.index_put((mine,), logprobs), groups.cp)
            entropy = gather_scored(blank.index_put((mine,), entropy), groups.cp)
        return logprobs, entropy


def build(plan: Blueprint, *, routed: bool) -> list[ScoringModel]:
    """This rank's model, or its pieces under a virtual pipeline, with uninitialised weights.

    Args:
        routed: Give routers the hook that replays or counts routes.
    """
    config = megatron_config(plan)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    stages = range(plan.layout.virtual) if plan.layout.virtual > 1 else (None,)
    frequencies, scale = rotation_table(plan)
    pieces = []
    for stage in stages:
        ends = {"ignore_virtual": False, "vp_stage": stage}
        first = get_transformer_layer_offset(config, vp_stage=stage)
        count = get_num_layers_to_build(config, vp_stage=stage)
        specs = [layer_spec(config, sparse=n in plan.shape.sparse_layers) for n in range(first, first + count)]
        piece = ScoringModel(
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules(layer_specs=specs, layer_norm=Norm),
            vocab_size=_padded(plan),
            max_sequence_length=plan.shape.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(**ends),
            post_process=parallel_state.is_pipeline_last_stage(**ends),
            share_embeddings_and_output_weights=plan.shape.tied,
            position_embedding_type="none" if plan.shape.mla else "rope",
            pg_collection=groups,
            vp_stage=stage,
        )
        piece.scoring = {"vocab": plan.shape.vocab, "chunk_tokens": plan.options.logprob_chunk_tokens}
        piece.padding_token = plan.shape.padding_token
        rotation = Rotation(frequencies.to(plan.device), scale, latent=plan.shape.mla)
        _fit(piece, plan, rotation, routed=routed)
        for tensor in (*piece.parameters(), *piece.buffers()):
            tensor.data = tensor.data.to(plan.device)  # routers are made on the CPU whatever the config says
        pieces.append(piece)
    return pieces


def _padded(plan: Blueprint) -> int:
    return -(-plan.shape.vocab // plan.layout.tensor) * plan.layout.tensor


def _fit(piece: ScoringModel, plan: Blueprint, rotation: nn.Module, *, routed: bool) -> None:
    """Exchange what Megatron makes for itself and no spec reaches: rotation, MLA's shared projections, replay."""
    if not plan.shape.mla:
        piece.rotary_pos_emb = rotation
    columns = sorted(plan.shape.sparse_layers)
    for layer in piece.decoder.layers:
        attention = layer.self_attention
        if isinstance(attention, MLASelfAttention):
            attention.rotary_pos_emb = rotation
            attention.config.rope_type = "yarn"  # asks the rotation for a scale, too; its own tables want CUDA
            _share_down_projections(attention)
        if routed and isinstance(layer.mlp, MoELayer):
            layer.mlp.router.router_replay = Replay()
            replay = replay_of(layer)
            assert replay is not None
            replay.column = columns.index(layer.layer_number - 1)


def _share_down_projections(attention: MLASelfAttention) -> None:
    """Keep them whole on each rank, as Megatron does with TransformerEngine.

    Its version without cuts them by columns and gathers the result, whose backward gives each rank's shared key only
    the gradient of that rank's own heads.
    """
    config = attention.config
    outputs = config.kv_lora_rank + config.qk_pos_emb_head_dim
    attention.linear_kv_down_proj = SameEverywhere(config, config.hidden_size, outputs)
    if config.q_lora_rank is not None:
        attention.linear_q_down_proj = SameEverywhere(config, config.hidden_size, config.q_lora_rank)
