"""Memory of one trainer rank, from architecture and parallel layout, before anything is launched.

Parameters, gradients and optimizer state are counted tensor by tensor; activations follow Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models" (2022), for attention that keeps no score matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any

from miles_core.planning.sizes import Sizes

ELEMENT = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
FLOAT32 = 4
NORM_BYTES = 8
"""Kept for each normalised element: 4 + 4 in float32, 4 + 2 + 2 in bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees of parallelism. CP ranks share the optimizer state like data-parallel ones; EP divides the experts among
    ranks that are there anyway."""

    gpus: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    """Pieces of the model on each stage; above 1 the schedule is interleaved."""
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = False

    def __post_init__(self) -> None:
        for name, size in (
            ("tp * pp * cp", self.tp * self.pp * self.cp),
            ("pp * ep * etp", self.pp * self.ep * self.etp),
        ):
            if size < 1 or self.gpus % size:
                raise ValueError(f"{name} = {size} does not divide {self.gpus} GPUs")

    @property
    def dp(self) -> int:
        """Data-parallel replicas of the dense part."""
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def expert_dp(self) -> int:
        """Data-parallel replicas of the experts."""
        return self.gpus // (self.pp * self.ep * self.etp)

    def layers_of(self, stage: int, layers: int) -> list[int]:
        """Which layers a stage holds: every `pp`-th piece."""
        size = ceil(layers / (self.pp * self.vpp))
        starts = (size * (self.pp * piece + stage) for piece in range(self.vpp))
        return [layer for start in starts for layer in range(start, min(layers, start + size))]

    def waiting(self, stage: int) -> float:
        """Micro-batches whose activations a stage holds, in layers of the whole stage: its warm-up passes and one."""
        if self.vpp == 1:
            return self.pp - stage
        return (2 * (self.pp - stage - 1) + (self.vpp - 1) * self.pp + 1) / self.vpp


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one rank computes at a time."""

    micro_batch_tokens: int
    """Tokens of a packed micro-batch on each rank; context-parallel ranks together pack so many times their number."""
    recompute: bool = False
    """Keep only the inputs of layers and recompute the rest in the backward pass."""
    recompute_layers: int = 1
    """Layers recomputed from one input."""
    logits_chunk_tokens: int | None = None
    """Tokens whose full-vocabulary logits exist at one time; None means all."""
    precision: str = "bfloat16"
    """Of forward and backward; a key of `ELEMENT`."""
    reference: bool = False
    """A frozen reference policy stays beside the trained one."""


@dataclass(frozen=True, slots=True)
class Item:
    what: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The fullest rank."""

    stage: int | None
    """Of the pipeline; None without one."""
    items: tuple[Item, ...]

    @property
    def total(self) -> int:
        return sum(item.num_bytes for item in self.items)

    def of(self, what: str) -> int:
        """Bytes of all items whose name begins so."""
        return sum(item.num_bytes for item in self.items if item.what.startswith(what))


Planner = Callable[[Any, Sizes, int, bool], RankMemory]
"""``(options, sizes, trainer ranks, whether a reference policy stays) -> the fullest rank``: what a backend's
capability names as `memory`. Its options are valid and its rules hold. It imports no torch: plans are made on any
machine."""


def megatron(sizes: Sizes, layout: Layout, work: Work) -> RankMemory:
    """Weights and float32 gradients on every replica; float32 masters and moments divided among replicas when the
    optimizer is distributed."""
    return max((_megatron_stage(sizes, layout, work, stage) for stage in range(layout.pp)), key=lambda rank: rank.total)


def _megatron_stage(sizes: Sizes, layout: Layout, work: Work, stage: int) -> RankMemory:
    held = layout.layers_of(stage, sizes.layers)
    ends = _end(sizes, sizes.embedding, layout.tp) if stage == 0 else 0.0
    if stage == layout.pp - 1:
        head = sizes.head or (sizes.embedding if layout.pp > 1 else 0)  # tied, it is copied to the last stage
        ends += _end(sizes, head, layout.tp) + sizes.other
    whole = sum(sizes.whole[i] for i in held) if sizes.whole else 0
    rest = sum(sizes.dense[i] for i in held) - whole
    dense = whole + rest / layout.tp + ends
    experts = sum(sizes.experts[i] for i in held) / (layout.ep * layout.etp)
    share = layout.dp * layout.cp if layout.distributed_optimizer else 1
    expert_share = layout.expert_dp if layout.distributed_optimizer else 1
    owned = dense / share + experts / expert_share
    element = ELEMENT[work.precision]
    masters = 0 if work.precision == "float32" else FLOAT32
    items = [
        Item("weights", round((dense + experts) * element)),
        Item("gradients, float32", round((dense + experts) * FLOAT32)),
        *([Item("optimizer state: float32 masters", round(owned * masters))] if masters else []),
        Item("optimizer state: moments", round(owned * 2 * FLOAT32)),
    ]
    if work.reference:
        items.append(Item("reference policy", round((dense + experts) * element)))
    tokens = work.micro_batch_tokens
    # Unfused, Megatron keeps one more copy of half the gated width and of each branch before it is added.
    more = (sizes.ffn_width / layout.tp + 2 * sizes.hidden) * element
    items += _activations(sizes, work, tokens, len(held), layout.waiting(stage), layout, more)
    if layout.pp > 1:
        # While a layer computes: a gradient that came from the next stage, and one on its way to the last.
        width = sizes.hidden / (layout.tp if layout.sequence_parallel else 1)
        items.append(Item("between stages", round(2 * tokens * width * element)))
    if stage == layout.pp - 1:
        items.append(_logits(sizes, work, tokens, layout.tp))
    return RankMemory(stage=stage if layout.pp > 1 else None, items=tuple(items))


def _end(sizes: Sizes, parameters: int, tp: int) -> float:
    """What a rank holds of an embedding or head, whose rows are filled up to equally many on every rank."""
    return parameters / sizes.vocabulary * ceil(sizes.vocabulary / tp)


def fsdp(sizes: Sizes, gpus: int, work: Work, *, replicas: int = 1) -> RankMemory:
    """Everything sharded over the ranks of a replica; a layer and the root are whole while they compute."""
    element, share = ELEMENT[work.precision], ceil(sizes.total * replicas / gpus)
    master = max(FLOAT32, element)  # float64 computes in its own masters
    widest = max(dense + experts for dense, experts in zip(sizes.dense, sizes.experts, strict=True))
    whole = widest + sizes.embedding + sizes.head + sizes.other
    items = [
        Item(f"weights, float{8 * master} masters", share * master),
        Item(f"gradients, float{8 * master}", share * master),
        Item("optimizer state: moments", 2 * share * master),
    ]
    if gpus > 1:
        items.append(Item("gathered layer and root", whole * element))
        items.append(Item("their gradients before they are scattered", whole * element))
    elif element < master:
        items.append(Item("weights, as computed with", sizes.total * element))
    if work.reference:
        items.append(Item("reference policy", share * element))
    one = Layout(gpus=1)
    items += _activations(sizes, work, work.micro_batch_tokens, sizes.layers, 1, one, 0.0)
    items.append(_logits(sizes, work, work.micro_batch_tokens, 1))
    return RankMemory(stage=None, items=tuple(items))


def layer_bytes_per_token(sizes: Sizes, element: int, tp: int = 1, *, sequence_parallel: bool = False) -> float:
    """What the backward pass of one layer needs of one token."""
    h, q, k = sizes.hidden, sizes.query_width, sizes.key_width
    # A norm keeps what it normalised (float32 of a narrower input, or the scaled copy beside it) and what it returns.
    residual = 2 * h * element + 2 * h * NORM_BYTES
    heads = (q + k) * NORM_BYTES if sizes.normalises_heads else 0
    attention = heads + (q + 2 * k) * element + 2 * (q + k) * element + q * element  # projections, rotary, output
    ffn = (4 * sizes.ffn_width + sizes.ffn_copies) * element  # gate, up, activation, product
    return (residual / tp if sequence_parallel else residual) + (attention + ffn) / tp


def _activations(
    sizes: Sizes, work: Work, tokens: int, layers: int, waiting: float, layout: Layout, more: float
) -> list[Item]:
    element = ELEMENT[work.precision]
    per_token = layer_bytes_per_token(sizes, element, layout.tp, sequence_parallel=layout.sequence_parallel)
    layer = tokens * (per_token + more)
    if not work.recompute:
        return [Item("activations", round(waiting * layers * layer))]
    kept = tokens * sizes.hidden * element / (layout.tp if layout.sequence_parallel else 1)
    return [
        Item("activations: inputs of layers", round(waiting * ceil(layers / work.recompute_layers) * kept)),
        Item("activations: what is being recomputed", round(min(layers, work.recompute_layers) * layer)),
    ]


def _logits(sizes: Sizes, work: Work, tokens: int, tp: int) -> Item:
    rows = min(tokens, work.logits_chunk_tokens or tokens)
    width = sizes.vocabulary / tp
    # The logits in the compute dtype, their float32 copy, and the gradient of that copy.
    return Item("logits", round(rows * width * (ELEMENT[work.precision] + 2 * FLOAT32)))
