"""CUDA graphs of decoding steps: one launch instead of some fifty a layer.

Only for the batch-invariant operators: their attention reads how long each row is from a table on the device, so that
one recorded step serves every length, and rows that merely fill up the recorded number change nothing for the others.

A graph holds addresses. It is dropped when key-values move; weights are updated in place and may change under it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_core.numerics.spans import Spans
from miles_local.attention import StepAttention
from miles_local.kv import SlotStore
from miles_local.scheduler import Plan

GRAIN = 8
"""Graphs are recorded for multiples of this many rows."""

Forward = Callable[[Tensor, Tensor, StepAttention], Tensor]
"""``(token_ids i64[N], positions i64[N], step) -> logits [N, V]``"""


@dataclass(frozen=True, slots=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    """i64[7, rows]: token ids, positions, places in the store; then the spans' table."""
    logits: Tensor


class DecodeGraphs:
    """Recorded decoding steps of one model over one store, by number of rows."""

    def __init__(self, forward: Forward, store: SlotStore, device: torch.device) -> None:
        self._forward = forward
        self._store = store
        self._device = device
        self._generation = -1
        self._recorded: dict[int, _Recorded] = {}

    def logits(self, plan: Plan) -> Tensor | None:
        """Logits ``[rows, V]`` of a step that only decodes, valid until the next call; None for other steps."""
        rows = len(plan.token_ids)
        if plan.prefill or plan.sampled != tuple(range(rows)):
            return None
        if self._generation != self._store.generation:
            self._recorded.clear()
            self._generation = self._store.generation
        size = -(-rows // GRAIN) * GRAIN
        inputs = _inputs(plan, self._store.capacity, size)
        if size not in self._recorded:
            self._recorded[size] = self._record(inputs.to(self._device))
        recorded = self._recorded[size]
        recorded.inputs.copy_(inputs)
        recorded.graph.replay()
        return recorded.logits[:rows]

    def _record(self, inputs: Tensor) -> _Recorded:
        token_ids, positions, index = inputs[:3]
        step = StepAttention(self._store, index, (), (), spans=Spans.from_table(1, inputs[3:]))
        # Once outside of the graph: kernels are compiled and tables placed. It writes what the replay will write.
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._forward(token_ids, positions, step)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # The trainer may use the device from another thread of this process meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            logits = self._forward(token_ids, positions, step)
        return _Recorded(graph, inputs, logits)


def _inputs(plan: Plan, capacity: int, size: int) -> Tensor:
    """i64[7, size]: the step's rows, then copies of the first: they write what it writes, and nobody reads theirs."""
    rows = len(plan.token_ids)
    starts = torch.tensor([plan.token_ids, plan.positions, plan.token_slots])
    starts = torch.cat([starts, starts[:, :1].expand(3, size - rows)], dim=1)
    token_ids, positions, slots = starts
    kv_rows = slots * capacity
    queries = torch.arange(size)
    return torch.stack([token_ids, positions, kv_rows + positions, queries, torch.ones_like(slots), positions, kv_rows])
