"""True-on-policy in the engine: the operators of `miles_core.numerics` over the slot store.

A token's log-prob is then the one that the trainer computes for it, bit for bit, whatever was decoded beside it and
however its prefix came to be stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from miles_core.numerics import ops, score
from miles_core.numerics.spans import Span, Spans
from miles_local.attention import StepAttention
from miles_local.sampling import Draw

NAME = "miles_slots_invariant"
"""Name of `invariant_attention` in transformers' register."""


def spans_of(step: StepAttention) -> Spans:
    """Every token of the step as a query over its slot; made by the first layer for all."""
    if step.spans is None:
        capacity = step.store.capacity
        spans = [
            Span(group.first_token + row, 1, length - 1, (group.first_slot + row) * capacity)
            for group in step.decode
            for row, length in enumerate(group.lengths)
        ]
        spans += [Span(part.first_token, part.count, part.start, part.slot * capacity) for part in step.prefill]
        step.spans = Spans(spans)
    return step.spans


def invariant_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    *,
    slots: StepAttention,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function as transformers calls it: query ``[1, Q, N, D]``, key and value ``[1, H, N, D]``.

    Returns:
        ``[1, N, Q, D]`` and no attention weights.
    """
    stored = slots.store.write(
        int(module.layer_idx),  # type: ignore[arg-type]
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        slots.index,
    )
    keys, values = (x.view(-1, *x.shape[2:]) for x in stored)
    return ops.attention(query[0].transpose(0, 1), keys, values, spans_of(slots), scaling)[None], None


def logprobs(logits: Tensor, token_ids: Sequence[int], draws: Sequence[Draw]) -> list[float]:
    """Log-prob of each sampled token as the trainer defines it; NaN where the logits are."""
    targets = torch.tensor(token_ids, device=logits.device)
    inverse = score.inverse_temperatures([draw.temperature for draw in draws]).to(logits.device)
    found: list[float] = score.logprobs(logits, targets, inverse).tolist()
    return found
