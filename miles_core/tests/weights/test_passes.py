"""Two passes, one bound: shared tensors, then experts, whose buckets count as what they become after the gather."""

from __future__ import annotations

import itertools
import time

from hypothesis import given
from hypothesis import strategies as st

from miles_core.weights.buckets import DEFAULT_BUCKET_BYTES, assign_senders, fused_group, is_expert, plan_passes

leaves = st.sampled_from(
    (
        *("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.v_proj.bias"),
        *("mlp.experts.0.gate_proj.weight", "mlp.experts.0.up_proj.weight", "mlp.experts.0.up_proj.weight_scale_inv"),
        *("mlp.experts.7.down_proj.weight", "mlp.shared_experts.down_proj.weight", "mlp.gate.weight"),
    )
)
trees = st.dictionaries(st.builds("model.layers.{}.{}".format, st.integers(0, 3), leaves), st.integers(1, 40))


@given(trees, st.integers(1, 200), st.sampled_from([1, 2, 8]))
def test_the_passes_are_the_model_and_gathered_buckets_keep_the_bound(
    sizes: dict[str, int], limit: int, degree: int
) -> None:
    shared, experts = plan_passes(sizes, limit, expert_parallel=degree)
    placed = [name for bucket in (*shared, *experts) for name in bucket]
    assert sorted(placed) == sorted(sizes)
    assert not any(is_expert(name) for bucket in shared for name in bucket)
    assert all(is_expert(name) for bucket in experts for name in bucket)
    for plan, factor in ((shared, 1), (experts, degree)):
        for bucket in plan:
            if factor * sum(sizes[name] for name in bucket) > limit:
                assert len({fused_group(name) for name in bucket}) == 1
    homes: dict[str, set[int]] = {}
    for index, bucket in enumerate((*shared, *experts)):
        for name in bucket:
            homes.setdefault(fused_group(name), set()).add(index)
    assert all(len(indices) == 1 for indices in homes.values())


def test_a_bucket_of_512_mib_on_each_of_8_ranks_would_be_4_gib_and_is_not_made() -> None:
    experts = {f"model.layers.0.mlp.experts.{n}.down_proj.weight": 16 * 2**20 for n in range(64)}
    _, plan = plan_passes(experts, DEFAULT_BUCKET_BYTES, expert_parallel=8)
    assert {len(bucket) for bucket in plan} == {4}  # 4 x 16 MiB x 8 ranks


def test_a_tree_of_many_thousands_of_tensors_is_planned_in_a_moment() -> None:
    sizes = {}
    for layer, expert in itertools.product(range(60), range(128)):
        for part in ("gate_proj", "up_proj", "down_proj"):
            sizes[f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"] = 4_000_000
    began = time.process_time()
    _, plan = plan_passes(sizes, DEFAULT_BUCKET_BYTES, expert_parallel=8)
    assert sum(map(len, plan)) == len(sizes) == 23_040
    assert time.process_time() - began < 10  # quadratic planning would take minutes


@given(st.lists(st.lists(st.integers(0, 20).map(str)), max_size=5))
def test_each_tensor_is_sent_by_the_first_stage_that_holds_it(stages: list[list[str]]) -> None:
    shares = assign_senders(stages)
    sent = [name for share in shares for name in share]
    assert sorted(sent) == sorted({name for names in stages for name in names})
    for index, share in enumerate(shares):
        assert all(name in stages[index] for name in share)
        assert not any(name in earlier for name in share for earlier in stages[:index])
