"""Training backend `fsdp`."""

from __future__ import annotations

from collections.abc import Iterable

from miles_core.plugin import Capability, Rule, hookimpl

MILES_API = 1

EXACT_DTYPE = Rule(
    id="fsdp-true-on-policy-dtype",
    when=("precision.true_on_policy=true",),
    needs=("backend.param_dtype=checkpoint", "backend.export_dtype=checkpoint"),
    because="true-on-policy is proven with both sides in the checkpoint's dtype",
    instead="leave backend.param_dtype and backend.export_dtype out",
)
EXACT_ATTENTION = Rule(
    id="fsdp-true-on-policy-attention",
    when=("precision.true_on_policy=true",),
    needs=("backend.attn_implementation=auto",),
    because="true-on-policy brings its own attention, the one that the engine decodes with",
    instead="leave backend.attn_implementation out",
)
REPLICAS = Rule(
    id="fsdp-replicas",
    check="miles_fsdp.rules:replicas_divide",
    because="each replica is sharded over equally many ranks",
    instead="a divisor of placement.trainer_ranks",
)


@hookimpl
def miles_backends() -> Iterable[Capability]:
    return [
        Capability(
            name="fsdp",
            summary="PyTorch FSDP2 over any Hugging Face causal LM; CPU or CUDA, one rank or many",
            load="miles_fsdp.backend:FsdpBackend",
            options="miles_fsdp.options:FsdpOptions",
            memory="miles_fsdp.memory:plan",
            rules=(EXACT_DTYPE, EXACT_ATTENTION, REPLICAS),
            provides=frozenset({"multi-rank", "reference-model", "replays-routes", "true-on-policy"}),
        )
    ]
