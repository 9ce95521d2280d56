"""Recorded experts in place of a router's own choice (R3), through the hook that Megatron's router has for it.

Megatron's `RouterReplay` keeps targets in module globals, in the order in which micro-batches are expected to come.
Here the micro-batch carries its routes, and each layer hands its router its own for the time of one forward: 1F1B,
interleaved stages and recomputation in the backward pass all see the routes of the micro-batch they work on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from miles_megatron.packed import Packed


class Replay:
    """What one router does with the routes of the micro-batch at hand; has the one method that Megatron asks."""

    def __init__(self) -> None:
        self.column = 0
        """Of this layer among all layers with experts."""
        self.packed: Packed | None = None
        self.differs: list[Tensor] = []
        """Recorded positions whose own choice is another set, one scalar for each counted forward."""

    def take(self) -> list[Tensor]:
        """What was counted since the last call."""
        counted, self.differs = self.differs, []
        return counted

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(scores f[n, E]) -> (scores of the chosen f[n, k], chosen i64[n, k]); gradients pass through the scores."""
        assert default_compute_topk is not None
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.packed is None or self.packed.routes is None:
            return values, own
        target = self.packed.routes[:, self.column]
        recorded = target[:, :1] >= 0
        if self.packed.counts:
            other = (own.sort(-1).values != target.sort(-1).values).any(-1)
            self.differs.append((other & recorded[:, 0]).sum())
        if not self.packed.replays:
            return values, own
        chosen = torch.where(recorded, target, own)
        return scores.gather(1, chosen), chosen


class Layer(TransformerLayer):  # type: ignore[misc]
    """Megatron's transformer layer, which shows its router the micro-batch."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        replay = replay_of(self)
        if replay is None:
            return super().forward(*args, **kwargs)
        replay.packed = kwargs.get("packed_seq_params")
        try:
            return super().forward(*args, **kwargs)
        finally:
            replay.packed = None


def replay_of(layer: Any) -> Replay | None:
    """The replay of a layer's router, or None where it has no experts or replays nothing."""
    replay = layer.mlp.router.router_replay if isinstance(layer.mlp, MoELayer) else None
    return replay if isinstance(replay, Replay) else None
