"""Which tensors of a weight version travel together: bounded buckets that never split a fused group.

Engines fuse some tensors into one (q, k, v; gate and up). A receiver that gets half of such a group must hold it back
or load a mixture, so the whole group goes into one bucket. Planning is pure and sees names and sizes only, so that
every rank of a trainer derives the same plan and tensors are gathered one at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from miles_core.errors import ConfigError
from miles_core.types import NamedTensor, WeightBucket

if TYPE_CHECKING:
    import torch

DEFAULT_BUCKET_BYTES = 512 * 2**20
"""Large enough that a collective's start-up cost vanishes, small enough that two of them fit beside a model."""

BucketPlan = tuple[tuple[str, ...], ...]
"""Names of each bucket, in sending order."""

_FUSED = (
    (re.compile(r"\.(?:q|k|v)_proj\."), ".qkv_proj."),
    (re.compile(r"\.(?:query|key|value)\."), ".query_key_value."),
    (re.compile(r"\.(?:q_a_proj|kv_a_proj_with_mqa)\."), ".fused_qkv_a_proj."),
    (re.compile(r"\.(?:gate|up)_proj\."), ".gate_up_proj."),
    (re.compile(r"\.w[13]\."), ".w13."),
)
_EXPERT = re.compile(r"\.experts\.\d+\.")
_LEAF = re.compile(r"\.[^.]+$")


def fused_group(name: str) -> str:
    """Key of the group a tensor belongs to: all tensors of the modules an engine fuses share one, weights with biases.

    Example:
        fused_group("model.layers.0.self_attn.q_proj.weight")  # "model.layers.0.self_attn.qkv_proj"
    """
    for pattern, joint in _FUSED:
        fused, count = pattern.subn(joint, name, count=1)
        if count:
            return _LEAF.sub("", fused)
    return _LEAF.sub("", name) if name.count(".") else name


def plan_buckets(
    sizes: Mapping[str, int],
    bucket_bytes: int,
    group_of: Callable[[str], str] = fused_group,
    *,
    gather_degree: int = 1,
) -> BucketPlan:
    """Place every tensor in exactly one bucket.

    Args:
        sizes: Bytes of each tensor, in sending order. Members of a group move to where its first one is.
        bucket_bytes: Bytes of one bucket at most. A group above it has a bucket of its own.
        group_of: Key of the group that a name belongs to.
        gather_degree: Ranks whose buckets are gathered into one before it is sent. The bound is on what travels: with
            8 expert-parallel ranks a bucket of 512 MiB on each would become one of 4 GiB.

    Returns:
        The names of each bucket; a function of the arguments alone. Empty for no tensors.

    Raises:
        ConfigError: `bucket_bytes` is not positive.
    """
    if bucket_bytes <= 0:
        raise ConfigError("bucket size must be positive", expected="at least 1 byte", found=f"{bucket_bytes} bytes")
    groups: dict[str, list[str]] = {}
    for name in sizes:
        groups.setdefault(group_of(name), []).append(name)
    plan: list[tuple[str, ...]] = []
    current: list[str] = []
    used = 0
    for names in groups.values():
        needed = gather_degree * sum(sizes[name] for name in names)
        if current and used + needed > bucket_bytes:
            plan.append(tuple(current))
            current, used = [], 0
        current.extend(names)
        used += needed
    if current:
        plan.append(tuple(current))
    return tuple(plan)


def is_expert(name: str) -> bool:
    """Whether a tensor belongs to one routed expert, and so lies on one expert-parallel rank only. Shared experts do
    not."""
    return _EXPERT.search(name) is not None


def plan_passes(
    sizes: Mapping[str, int],
    bucket_bytes: int,
    *,
    expert_parallel: int = 1,
    group_of: Callable[[str], str] = fused_group,
) -> tuple[BucketPlan, BucketPlan]:
    """Plan what a rank holds in two passes: all that every expert-parallel rank has, then the experts of its own.

    The passes are gathered over different groups of ranks. Experts' names are the rank's own; the ranks of an
    expert-parallel group hold equally many of equal size, so that their plans match bucket by bucket.

    Args:
        sizes: Bytes of each tensor on this rank, in sending order.
        bucket_bytes: Bytes of one bucket at most, after the gather.
        expert_parallel: Ranks over which the experts are spread.
    """
    shared = {name: size for name, size in sizes.items() if not is_expert(name)}
    experts = {name: size for name, size in sizes.items() if is_expert(name)}
    return (
        plan_buckets(shared, bucket_bytes, group_of),
        plan_buckets(experts, bucket_bytes, group_of, gather_degree=expert_parallel),
    )


def assign_senders(stages: Sequence[Iterable[str]]) -> tuple[tuple[str, ...], ...]:
    """Which names each pipeline stage sends: all it holds, except what an earlier stage holds too (tied embeddings)."""
    sent: set[str] = set()
    shares = []
    for names in stages:
        share = tuple(name for name in dict.fromkeys(names) if name not in sent)
        sent.update(share)
        shares.append(share)
    return tuple(shares)


def fill_buckets(plan: BucketPlan, fetch: Callable[[str], torch.Tensor], version: int) -> Iterator[WeightBucket]:
    """Make the planned buckets of `version`, one at a time; `fetch` is called once per name, in the plan's order."""
    for index, names in enumerate(plan):
        tensors = tuple(NamedTensor(name=name, tensor=fetch(name)) for name in names)
        yield WeightBucket(version=version, index=index, last=index == len(plan) - 1, tensors=tensors)


def bucket_tensors(
    tensors: Sequence[NamedTensor], *, version: int, bucket_bytes: int, group_of: Callable[[str], str] = fused_group
) -> Iterator[WeightBucket]:
    """Buckets of tensors that are already at hand.

    Raises:
        ConfigError: two tensors have one name, or `bucket_bytes` is not positive.
    """
    by_name = {named.name: named.tensor for named in tensors}
    if len(by_name) != len(tensors):
        names = [named.name for named in tensors]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ConfigError("two tensors have one name", expected="each name once", found=", ".join(twice))
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in by_name.items()}
    return fill_buckets(plan_buckets(sizes, bucket_bytes, group_of), by_name.__getitem__, version)
