"""Training backend `megatron`."""

from __future__ import annotations

from collections.abc import Iterable

from miles_core.plugin import Capability, Rule, hookimpl

MILES_API = 1

_RULES = (
    Rule(
        id="megatron-layout",
        check="miles_megatron.rules:layout_divides",
        because="a replica takes tensor x pipeline x context ranks, its experts expert x expert-tensor x pipeline",
        instead="sizes whose product divides placement.trainer_ranks",
    ),
    Rule(
        id="megatron-divides-the-model",
        check="miles_megatron.rules:divides_the_model",
        because="each rank takes equally many heads, rows, layers and experts",
        instead="sizes that divide those of the model",
    ),
    Rule(
        id="megatron-computes-the-model",
        check="miles_megatron.rules:computes_the_model",
        because="log-probs would silently be those of another model",
        instead="backend: fsdp",
    ),
    Rule(
        id="megatron-virtual-pipeline",
        check="miles_megatron.rules:virtual_needs_pipeline",
        because="interleaving cuts the bubble between stages, and one stage has none",
        instead="backend.virtual_pipeline: 1, or backend.pipeline_parallel above 1",
    ),
    Rule(
        id="megatron-sequence-parallel",
        when=("backend.sequence_parallel=true",),
        check="miles_megatron.rules:sequence_needs_tensor",
        because="sequence parallelism splits activations over the tensor-parallel ranks, and there is one",
        instead="backend.sequence_parallel: false",
    ),
    Rule(
        id="megatron-experts-sequence",
        when=("backend.sequence_parallel=false",),
        check="miles_megatron.rules:experts_need_sequence",
        because="Megatron trains experts under tensor parallelism only with sequence parallelism",
        instead="backend.sequence_parallel: true",
    ),
    Rule(
        id="megatron-recompute-layers",
        when=("backend.recompute=none",),
        check="miles_megatron.rules:recompute_layers_are_read",
        because="nothing is recomputed, so nothing reads how many layers at a time",
        instead="backend.recompute: full, or no backend.recompute_layers",
    ),
)


@hookimpl
def miles_backends() -> Iterable[Capability]:
    return [
        Capability(
            name="megatron",
            summary="Megatron Core: tensor, pipeline, context and expert parallelism for large MoE",
            load="miles_megatron.backend:MegatronBackend",
            options="miles_megatron.options:MegatronOptions",
            memory="miles_megatron.memory:plan",
            provides=frozenset({"multi-rank", "reference-model", "replays-routes", "reads-tables"}),
            rules=_RULES,
        )
    ]


@hookimpl
def miles_architectures() -> Iterable[Capability]:
    tables = "miles_megatron.architectures"
    return [
        Capability(
            name="llama-for-causal-lm",
            summary="Llama, SmolLM2 and others of its shape: dense, grouped-query attention",
            load=f"{tables}.dense:LLAMA",
        ),
        Capability(
            name="qwen2-for-causal-lm",
            summary="Qwen2 and Qwen2.5: dense, attention biases",
            load=f"{tables}.dense:QWEN2",
        ),
        Capability(
            name="qwen3-for-causal-lm",
            summary="Qwen3: dense, normalised queries and keys",
            load=f"{tables}.dense:QWEN3",
        ),
        Capability(
            name="qwen3-moe-for-causal-lm",
            summary="Qwen3-MoE: experts in all layers or some, softmax router",
            load=f"{tables}.sparse:QWEN3_MOE",
        ),
        Capability(
            name="glm4-moe-for-causal-lm",
            summary="GLM-4.5, 4.6 and 4.7: sigmoid router with a bias, shared experts",
            load=f"{tables}.sparse:GLM4_MOE",
        ),
        Capability(
            name="deepseek-v3-for-causal-lm",
            summary="DeepSeek-V3 and R1: latent attention, grouped sigmoid router, shared experts",
            load=f"{tables}.sparse:DEEPSEEK_V3",
        ),
    ]
