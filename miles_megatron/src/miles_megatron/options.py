"""Options of the `megatron` backend."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveInt


class MegatronOptions(BaseModel):
    """How the trainer's ranks share the model and compute. None of these changes the objective.

    Data parallelism is what is left: trainer ranks / (tensor x pipeline x context).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    tensor_parallel: PositiveInt = 1
    """Ranks that share each matrix of attention and dense MLP."""
    sequence_parallel: bool = False
    """Split activations between matrices over the tensor-parallel ranks, too; mixtures of experts need it there."""
    pipeline_parallel: PositiveInt = 1
    """Stages of consecutive layers; 1F1B schedule."""
    virtual_pipeline: PositiveInt = 1
    """Pieces of the model on each stage; above 1 the schedule is interleaved and its bubble smaller."""
    context_parallel: PositiveInt = 1
    """Ranks that share each packed row of tokens; attention exchanges tokens for heads."""
    expert_parallel: PositiveInt = 1
    """Ranks that share the experts of each layer; takes its ranks from tensor, context and data parallelism."""
    expert_tensor_parallel: PositiveInt = 1
    """Ranks that share each expert's matrices."""
    distributed_optimizer: bool = False
    """Shard master weights and optimizer state over the data-parallel ranks."""
    recompute: Literal["none", "full"] = "none"
    """Recompute decoder layers in the backward pass: about a third more time, far less activation memory."""
    recompute_layers: PositiveInt = 1
    """Layers recomputed from one kept activation; read when recompute is full."""
    param_dtype: Literal["checkpoint", "float32", "bfloat16"] = "checkpoint"
    """Dtype of forward and backward; checkpoint is the model folder's own, in which engines sample too. Master
    weights, summed gradients and optimizer state are float32."""
    micro_batch_tokens: PositiveInt = 4096
    """Tokens of one packed micro-batch on each rank: context-parallel ranks share a row of that times their number; a
    longer sequence has a micro-batch of its own."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits exist at one time; chunks beyond the first are recomputed in backward."""
    bucket_mib: PositiveInt = 256
    """MiB of one exported weight bucket at most."""
    export_dtype: Literal["checkpoint", "float32", "bfloat16", "float16"] = "checkpoint"
    """Dtype of exported floating-point weights; checkpoint keeps each tensor's own."""

    def on_one_rank(self) -> MegatronOptions:
        """These options for one rank alone; a checkpoint is the same under any layout."""
        sizes = ("tensor", "pipeline", "context", "expert", "expert_tensor")
        alone = dict.fromkeys((f"{name}_parallel" for name in sizes), 1)
        return self.model_copy(update={**alone, "virtual_pipeline": 1, "sequence_parallel": False})
