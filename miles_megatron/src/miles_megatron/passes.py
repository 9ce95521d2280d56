"""Forward and backward passes over micro-batches, through Megatron's pipeline schedules.

Schedules ask for a step function that returns the model's output and a function of that output. Every stage walks the
same micro-batches in the same order; only the last one evaluates them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from miles_core.types import TrainBatch
from miles_megatron.packed import Packed

Item = tuple[TrainBatch, Packed]
Evaluate = Callable[[TrainBatch, Tensor, Tensor], Tensor]
"""(micro-batch, log-probs f[K], entropy f[K]) -> the loss; on the last stage only."""


def run(
    models: Sequence[Any],
    items: Sequence[Callable[[], Item]],
    evaluate: Evaluate,
    *,
    backward: bool,
    length: int | None,
) -> None:
    """Pass every micro-batch through the model. A collective of ranks that share a pipeline or experts.

    Args:
        models: This rank's pieces.
        items: Makes each micro-batch when its turn comes; called once for each piece of the model.
        evaluate: May keep what it needs; its result is differentiated when `backward`.
        length: Of every packed row, where the schedule wants them equal.
    """

    def step(iterator: Iterator[Callable[[], Item]], model: Any) -> Any:
        batch, packed = next(iterator)()
        output = model(
            input_ids=packed.token_ids,
            position_ids=packed.positions[None] if packed.positions is not None else None,
            attention_mask=None,
            packed_seq_params=packed,
        )

        def finish(scores: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, None]:
            # Megatron multiplies nothing into a loss that comes with a number of tokens (calculate_per_token_loss).
            return evaluate(batch, *scores), torch.zeros((), dtype=torch.int), None

        return output, finish

    iterators = [iter(items) for _ in models]
    several = len(models) > 1
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators if several else iterators[0],
        model=list(models) if several else models[0],
        num_microbatches=len(items),
        # Without a common length each message says its own shape (variable_seq_lengths).
        seq_length=length or 1,
        micro_batch_size=1,
        forward_only=not backward,
    )
