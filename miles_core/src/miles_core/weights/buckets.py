"""Which tensors of a weight version travel together: bounded buckets that never split a fused group.

Engines fuse some tensors into one (q, k, v; gate and up). A receiver that gets half of such a group must hold it back
or load a mixture, so the whole group goes into one bucket. Planning is pure and sees the names and sizes of whole
tensors only. So every rank of a trainer derives the same plan, tensors are gathered one at a time, and the bound is on
what travels: 512 MiB of experts on each of 8 expert-parallel ranks would be 4 GiB once gathered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from miles_core.errors import ConfigError
from miles_core.types import NamedTensor, WeightBucket

if TYPE_CHECKING:
    import torch

BucketPlan = tuple[tuple[str, ...], ...]
"""Names of each bucket, in sending order."""

_FUSED = (
    (re.compile(r"\.(?:q|k|v)_proj\."), ".qkv_proj."),
    (re.compile(r"\.(?:query|key|value)\."), ".query_key_value."),
    (re.compile(r"\.(?:q_a_proj|kv_a_proj_with_mqa)\."), ".fused_qkv_a_proj."),
    (re.compile(r"\.(?:gate|up)_proj\."), ".gate_up_proj."),
    (re.compile(r"\.w[13]\."), ".w13."),
)
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
) -> BucketPlan:
    """Place every tensor in exactly one bucket.

    Args:
        sizes: Bytes of each whole tensor, gathered from the ranks that share it, in sending order. Members of a group
            move to where its first one is.
        bucket_bytes: Bytes of one bucket at most. A group above it has a bucket of its own.
        group_of: Key of the group that a name belongs to.

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
        needed = sum(sizes[name] for name in names)
        if current and used + needed > bucket_bytes:
            plan.append(tuple(current))
            current, used = [], 0
        current.extend(names)
        used += needed
    if current:
        plan.append(tuple(current))
    return tuple(plan)


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
