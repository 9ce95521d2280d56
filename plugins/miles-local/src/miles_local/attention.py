"""Attention of one engine step over the slot store, for any transformers model that takes a custom attention function.

A step is one flat row of tokens, without padding: first the tokens of decoding rows (one each, ascending slots), then
the chunks of prompts being prefilled. The linear layers see only real tokens; here each part attends to its own slot.
The model gets no cache object and no mask from transformers: positions are explicit and causality is decided below.

Shapes: N tokens of the step, Q query heads, H key-value heads, D head dimensions, B rows of a decode group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from miles_core.errors import EngineError
from miles_core.numerics.spans import Spans
from miles_local.kv import SlotStore, attention_mask

NAME = "miles_slots"
"""Name of the attention function in transformers' register."""

GROUP_OVERHEAD_TOKENS = 256
"""A further kernel call costs about as much as attending to this many keys; decides how rows of unequal length are
grouped."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Neighbouring slots with one new token each."""

    first_token: int
    first_slot: int
    lengths: tuple[int, ...]
    """Tokens of each row, the new one included."""


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """Consecutive new tokens of one row."""

    first_token: int
    slot: int
    start: int
    """Tokens of the row already stored."""
    count: int


@dataclass(slots=True)
class StepAttention:
    """What the attention function needs to know of the step; travels as the forward's keyword ``slots``."""

    store: SlotStore
    index: Tensor
    """i64[N] place of each token in the store."""
    decode: tuple[DecodeGroup, ...]
    prefill: tuple[PrefillPart, ...]
    masks: dict[tuple[int, int | None, torch.dtype], Tensor | None] = field(default_factory=dict)
    """Shared by all layers of the step."""
    spans: Spans | None = None
    """The same parts for the batch-invariant attention; filled by the first layer."""

    def mask(self, group: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Mask of a decode group, or None when every row sees every key."""
        key = (group, window, dtype)
        if key not in self.masks:
            lengths = self.decode[group].lengths
            width = max(lengths)
            if min(lengths) == width and (window is None or width <= window):
                self.masks[key] = None
            else:
                self.masks[key] = attention_mask(torch.tensor(lengths, device=self.index.device), width, window, dtype)
        return self.masks[key]


def group_rows(slots: list[int], lengths: list[int]) -> list[tuple[int, int]]:
    """Cut decoding rows into runs of neighbouring slots whose lengths are worth padding to each other.

    Returns:
        Ranges ``[first, last)`` over the rows, in order, covering each row once.
    """
    groups: list[tuple[int, int]] = []
    first = 0
    for row in range(1, len(slots) + 1):
        if row < len(slots) and slots[row] == slots[row - 1] + 1:
            longest = max(lengths[first:row])
            together = (row - first + 1) * max(longest, lengths[row])
            apart = (row - first) * longest + lengths[row] + GROUP_OVERHEAD_TOKENS
            if together <= apart:
                continue
        if row > first:
            groups.append((first, row))
        first = row
    return groups


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    slots: StepAttention,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function as transformers calls it: query ``[1, Q, N, D]``, key and value ``[1, H, N, D]``.

    Args:
        slots: The step, handed through the model's forward.
        sliding_window: Keys a query sees, itself included, in layers that have a window.
        softcap: Bound of the scores (Gemma 2).
        s_aux: [Q] learned score of "no key" (GPT-OSS).

    Returns:
        ``[1, N, Q, D]`` and no attention weights.
    """
    if position_bias is not None:
        raise EngineError("engine `local` does not support attention with position biases", where=type(module).__name__)
    keys, values = slots.store.write(
        int(module.layer_idx),  # type: ignore[arg-type]
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        slots.index,
    )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    heads, tokens = query.shape[1], query.shape[2]
    by_token = query[0].transpose(0, 1)
    parts: list[Tensor] = []
    for number, group in enumerate(slots.decode):
        rows, width = len(group.lengths), max(group.lengths)
        queries = by_token[group.first_token : group.first_token + rows]
        where = (slice(group.first_slot, group.first_slot + rows), slice(0, width))
        mask = slots.mask(number, sliding_window, query.dtype)
        # The query heads of one key-value head become the queries of one batch entry: no key is repeated.
        grouped = queries.reshape(rows, keys.shape[2], -1, query.shape[-1])
        found = _attend(grouped, keys[where], values[where], mask, scale, softcap, _per_group(s_aux, keys.shape[2]))
        parts.append(found.reshape(rows, heads, -1))
    for part in slots.prefill:
        queries = by_token[part.first_token : part.first_token + part.count].transpose(0, 1)[None]
        end = part.start + part.count
        stored = keys[part.slot, None, :end], values[part.slot, None, :end]
        repeat = heads // keys.shape[2]
        wide = [t.repeat_interleave(repeat, dim=2) if repeat > 1 else t for t in stored]
        mask = _prefill_mask(part, sliding_window, query)
        sinks = None if s_aux is None else s_aux.view(1, heads, 1, 1)
        found = _attend(queries, wide[0], wide[1], mask, scale, softcap, sinks, causal=mask is None)
        parts.append(found[0].transpose(0, 1))
    output = parts[0] if len(parts) == 1 else torch.cat(parts)
    return output.reshape(1, tokens, heads, -1), None


def _per_group(s_aux: Tensor | None, kv_heads: int) -> Tensor | None:
    return None if s_aux is None else s_aux.view(1, kv_heads, -1, 1)


def _prefill_mask(part: PrefillPart, window: int | None, query: Tensor) -> Tensor | None:
    """bool ``[count, start + count]``, or None for plain causality from the row's first token."""
    end = part.start + part.count
    if part.start == 0 and (window is None or end <= window):
        return None
    queries = torch.arange(part.start, end, device=query.device)[:, None]
    positions = torch.arange(end, device=query.device)[None]
    seen = positions <= queries
    return seen if window is None else seen & (positions > queries - window)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    causal: bool = False,
) -> Tensor:
    """Query ``[B, heads, queries, D]`` against keys and values ``[B, tokens, heads, D]``; returns the query's
    layout."""
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=causal and query.shape[2] > 1, scale=scale
        )
    scores = torch.matmul(query, keys.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if sinks is None:
        return torch.matmul(scores.softmax(-1).to(values.dtype), values)
    column = sinks.float().expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    return torch.matmul(weights.to(values.dtype), values)
