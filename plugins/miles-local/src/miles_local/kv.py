"""Key-value storage: one padded row per running request ("slot") and layer, owned by the model's thread.

Shapes: S slots, C capacity in tokens, H key-value heads, D head dimensions. A layer's tensors are ``[S, C, H, D]``: a
row's tokens lie together, so that copying a prefix is one block copy, and a new token of every row is one indexed
write. Layers appear when the model first writes them, with their own H and D; keys and values may differ in D.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GRAIN = 64
"""Capacities are multiples of this, so that storage is not reallocated for every token."""


@dataclass(frozen=True, slots=True)
class SavedKV:
    """Keys and values of one token sequence, outside any slot."""

    layers: dict[int, tuple[Tensor, Tensor]]
    """Per layer ``[tokens, H, D]`` each."""


class SlotStore:
    """Keys and values of every slot and layer."""

    def __init__(self) -> None:
        self.slots = 0
        self.capacity = 0
        self.generation = 0
        """Changes whenever tensors move; a recorded graph of an older one is void."""
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for pair in self._layers.values() for t in pair)

    def reserve(self, slots: int, capacity: int) -> None:
        """Make room for `slots` rows of `capacity` tokens; keeps what is stored within that.

        A resize takes the present need plus a quarter, not the largest ever seen, so that one long request does not
        make every later batch as wide as itself.
        """
        if slots <= self.slots and capacity <= self.capacity:
            return
        grown = -(-capacity * 5 // 4 // GRAIN) * GRAIN
        if capacity <= self.capacity < grown:
            grown = self.capacity
        kept_slots, kept_tokens = min(slots, self.slots), min(grown, self.capacity)
        self.slots, self.capacity = slots, grown
        self.generation += 1
        for layer, pair in self._layers.items():
            fresh = [self._zeros(old) for old in pair]
            for old, new in zip(pair, fresh, strict=True):
                new[:kept_slots, :kept_tokens] = old[:kept_slots, :kept_tokens]
            self._layers[layer] = (fresh[0], fresh[1])

    def _zeros(self, like: Tensor) -> Tensor:
        # Zeros, not uninitialised memory: padding has attention weight 0, and 0 * NaN would be NaN.
        return like.new_zeros((self.slots, self.capacity, *like.shape[-2:]))

    def write(self, layer: int, key: Tensor, value: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Store new tokens and return the layer's keys and values.

        Args:
            key, value: ``[N, H, D]`` of N new tokens.
            index: i64[N], ``slot * capacity + position`` of each.
        """
        if layer not in self._layers:
            self.generation += 1
            self._layers[layer] = (self._zeros(key), self._zeros(value))
        pair = self._layers[layer]
        for stored, new in zip(pair, (key, value), strict=True):
            stored.view(-1, *stored.shape[2:]).index_copy_(0, index, new)
        return pair

    def copy(self, source: int, target: int, tokens: int) -> None:
        for pair in self._layers.values():
            for stored in pair:
                stored[target, :tokens] = stored[source, :tokens]

    def save(self, slot: int, tokens: int) -> SavedKV:
        return SavedKV({i: (k[slot, :tokens].clone(), v[slot, :tokens].clone()) for i, (k, v) in self._layers.items()})

    def load(self, saved: SavedKV, slot: int, tokens: int) -> None:
        for layer, pair in saved.layers.items():
            for stored, source in zip(self._layers[layer], pair, strict=True):
                stored[slot, :tokens] = source[:tokens]

    def clear(self) -> None:
        """Forget everything: other weights would have made other keys and values."""
        self._layers.clear()
        self.generation += 1
        self.slots = self.capacity = 0


def attention_mask(lengths: Tensor, width: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Additive mask of one query per row, the row's last token.

    Args:
        lengths: i64[B] tokens of each row, the query included.
        width: Keys of the padded batch.
        window: Sliding window in tokens, or None.

    Returns:
        ``[B, 1, 1, width]``, 0 where the query sees the key and -inf elsewhere.
    """
    positions = torch.arange(width, device=lengths.device)
    seen = positions < lengths[:, None]
    if window is not None:
        seen &= positions >= lengths[:, None] - window
    mask = torch.zeros(seen.shape, dtype=dtype, device=lengths.device)
    return mask.masked_fill_(~seen, float("-inf"))[:, None, None, :]
