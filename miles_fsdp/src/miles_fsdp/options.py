"""Options of the `fsdp` backend."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveInt

ComputeDtype = Literal["checkpoint", "float32", "bfloat16", "float64"]


class FsdpOptions(BaseModel):
    """How one trainer rank computes. None of these changes the objective."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    dp_replicate: PositiveInt = 1
    """Replicas of the sharded model; each is sharded over world size / dp_replicate ranks."""
    param_dtype: ComputeDtype = "checkpoint"
    """Dtype of forward and backward; checkpoint is the model folder's own, in which engines sample too. Master
    weights and optimizer state are float32 (float64 for float64)."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients are summed over ranks; float64 compute reduces in float64."""
    gradient_checkpointing: bool = False
    """Recompute each decoder layer in the backward pass: about a third more time, far less activation memory."""
    micro_batch_tokens: PositiveInt = 4096
    """Tokens of one packed micro-batch on one rank; a longer sequence has a micro-batch of its own."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose full-vocabulary logits exist at one time; chunks beyond the first are recomputed in backward."""
    bucket_mib: PositiveInt = 256
    """MiB of one exported weight bucket at most."""
    export_dtype: Literal["checkpoint", "float32", "bfloat16", "float16"] = "checkpoint"
    """Dtype of exported floating-point weights; checkpoint keeps each tensor's own."""
    attn_implementation: Literal["auto", "packed", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "auto"
    """Attention over packed sequences; auto takes `packed` where the architecture allows it, else `sdpa`."""
