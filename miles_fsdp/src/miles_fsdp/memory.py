"""What a rank of this backend will hold."""

from __future__ import annotations

from miles_core.planning.memory import RankMemory, Work, fsdp
from miles_core.planning.sizes import Sizes
from miles_fsdp.options import FsdpOptions


def plan(options: FsdpOptions, sizes: Sizes, ranks: int, reference: bool) -> RankMemory:
    """See `miles_core.planning.memory.Planner`."""
    work = Work(
        micro_batch_tokens=options.micro_batch_tokens,
        recompute=options.gradient_checkpointing,
        logits_chunk_tokens=options.logprob_chunk_tokens,
        precision=sizes.dtype if options.param_dtype == "checkpoint" else options.param_dtype,
        reference=reference,
    )
    return fsdp(sizes, ranks, work, replicas=options.dp_replicate)
