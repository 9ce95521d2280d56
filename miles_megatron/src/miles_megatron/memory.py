"""What a rank of this backend will hold."""

from __future__ import annotations

from miles_core.planning.memory import Layout, RankMemory, Work, megatron
from miles_core.planning.sizes import Sizes
from miles_megatron.options import MegatronOptions


def plan(options: MegatronOptions, sizes: Sizes, ranks: int, reference: bool) -> RankMemory:
    """See `miles_core.planning.memory.Planner`; of the fullest pipeline stage."""
    layout = Layout(
        gpus=ranks,
        tp=options.tensor_parallel,
        pp=options.pipeline_parallel,
        vpp=options.virtual_pipeline,
        cp=options.context_parallel,
        ep=options.expert_parallel,
        etp=options.expert_tensor_parallel,
        sequence_parallel=options.sequence_parallel,
        distributed_optimizer=options.distributed_optimizer,
    )
    work = Work(
        micro_batch_tokens=options.micro_batch_tokens,
        recompute=options.recompute == "full",
        recompute_layers=options.recompute_layers,
        logits_chunk_tokens=options.logprob_chunk_tokens,
        precision=sizes.dtype if options.param_dtype == "checkpoint" else options.param_dtype,
        reference=reference,
    )
    return megatron(sizes, layout, work)
