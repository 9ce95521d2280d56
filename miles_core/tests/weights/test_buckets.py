"""Buckets hold every tensor once, keep fused groups whole, and are a function of names and sizes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_core.errors import ConfigError
from miles_core.types import NamedTensor
from miles_core.weights.buckets import bucket_tensors, fused_group, plan_buckets

LEAVES = (
    "self_attn.q_proj.weight",
    "self_attn.q_proj.bias",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "mlp.experts.3.gate_proj.weight",
    "mlp.experts.3.up_proj.weight",
    "input_layernorm.weight",
)
names = st.builds("model.layers.{}.{}".format, st.integers(0, 3), st.sampled_from(LEAVES))
sizes = st.dictionaries(names, st.integers(0, 50), max_size=30)


@given(sizes, st.integers(1, 120))
def test_every_tensor_is_in_one_bucket_and_no_group_is_split(sizes: dict[str, int], limit: int) -> None:
    plan = plan_buckets(sizes, limit)
    placed = [name for bucket in plan for name in bucket]
    assert sorted(placed) == sorted(sizes)
    homes: dict[str, set[int]] = {}
    for index, bucket in enumerate(plan):
        for name in bucket:
            homes.setdefault(fused_group(name), set()).add(index)
    assert all(len(indices) == 1 for indices in homes.values())


@given(sizes, st.integers(1, 120))
def test_only_a_single_group_may_exceed_the_limit(sizes: dict[str, int], limit: int) -> None:
    for bucket in plan_buckets(sizes, limit):
        if sum(sizes[name] for name in bucket) > limit:
            assert len({fused_group(name) for name in bucket}) == 1


@given(sizes, st.integers(1, 120))
def test_neighbouring_buckets_could_not_have_been_one(sizes: dict[str, int], limit: int) -> None:
    plan = plan_buckets(sizes, limit)
    for left, right in itertools.pairwise(plan):
        first_group = [name for name in right if fused_group(name) == fused_group(right[0])]
        assert sum(sizes[name] for name in (*left, *first_group)) > limit


def test_a_tree_of_many_thousands_of_tensors_keeps_the_bound() -> None:
    parts = itertools.product(range(60), range(128), ("gate_proj", "up_proj", "down_proj"))
    sizes = {f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight": 4_000_000 for layer, expert, part in parts}
    plan = plan_buckets(sizes, 512 * 2**20)
    assert [name for bucket in plan for name in bucket] == list(sizes)
    assert {len(bucket) for bucket in plan[:-1]} <= {132, 133, 134}  # full but for one group of two


@pytest.mark.parametrize(
    ("names", "together"),
    [
        (("a.q_proj.weight", "a.k_proj.weight", "a.v_proj.bias"), True),
        (("a.gate_proj.weight", "a.up_proj.weight"), True),
        (("a.experts.0.w1.weight", "a.experts.0.w3.weight"), True),
        (("a.q_a_proj.weight", "a.kv_a_proj_with_mqa.weight"), True),
        (("a.o_proj.weight", "a.o_proj.weight_scale_inv"), True),
        (("a.q_proj.weight", "a.o_proj.weight"), False),
        (("a.gate_proj.weight", "a.down_proj.weight"), False),
        (("layers.0.q_proj.weight", "layers.1.k_proj.weight"), False),
        (("experts.0.gate_proj.weight", "experts.1.up_proj.weight"), False),
        (("a.gate.weight", "a.gate_proj.weight"), False),
    ],
)
def test_groups_are_what_engines_fuse(names: tuple[str, ...], together: bool) -> None:
    assert (len({fused_group(name) for name in names}) == 1) == together


def test_members_of_a_group_move_to_where_the_first_one_is() -> None:
    sizes = {"a.q_proj.weight": 1, "b.weight": 1, "a.k_proj.weight": 1}
    assert plan_buckets(sizes, 100) == (("a.q_proj.weight", "a.k_proj.weight", "b.weight"),)


def test_the_last_bucket_and_no_other_is_marked_so() -> None:
    tensors = [NamedTensor(name=f"t{i}.weight", tensor=torch.zeros(4)) for i in range(5)]
    buckets = list(bucket_tensors(tensors, version=9, bucket_bytes=32))
    assert [(b.version, b.index, b.last, len(b.tensors)) for b in buckets] == [
        (9, 0, False, 2),
        (9, 1, False, 2),
        (9, 2, True, 1),
    ]


def test_two_tensors_of_one_name_and_empty_buckets_are_refused() -> None:
    twice = [NamedTensor(name="a.weight", tensor=torch.zeros(1))] * 2
    with pytest.raises(ConfigError, match=r"a\.weight"):
        bucket_tensors(twice, version=0, bucket_bytes=8)
    with pytest.raises(ConfigError, match="positive"):
        plan_buckets({"a": 1}, 0)
