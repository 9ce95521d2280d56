"""Packing, filling, splitting and planning of batches."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core import batching
from miles_core.algorithms import advantages, corrections
from miles_core.errors import ContractError, PluginError, RunError
from miles_core.kinds.advantage import AdvantageInputs
from miles_core.routing.codec import recorded_rows
from miles_core.types import (
    Boundary,
    Failure,
    Group,
    Prompt,
    Status,
    TokenSpan,
    TrainBatch,
    Trajectory,
)


def trajectory(length: int = 4, *, prompt: int = 2, version: int = 3, **changes: Any) -> Trajectory:
    """A row of `prompt` given and ``length - prompt`` sampled tokens."""
    sampled = np.arange(length) >= prompt
    row = Trajectory(
        prompt_id="p",
        session_id="s",
        token_ids=np.arange(10, 10 + length, dtype=np.int32),
        sampled=sampled,
        loss_mask=sampled,
        logprobs=np.where(sampled, -0.5, np.nan).astype(np.float32),
        spans=(TokenSpan(start=prompt, end=length, weight_version=version),),
        temperature=0.7,
        status=Status.COMPLETED,
        reward=1.0,
    )
    return replace(row, **changes)


def group(*rows: Trajectory) -> Group:
    return Group(prompt=Prompt(id="p", messages=()), trajectories=rows)


def test_pack_concatenates_whole_rows_in_order() -> None:
    batch = batching.pack([group(trajectory(4, reward=0.5), trajectory(3, version=7)), group(trajectory(5))])
    assert batch.lengths.tolist() == [4, 3, 5]
    assert batch.group_ids.tolist() == [0, 0, 1]
    assert batch.rewards.tolist() == [0.5, 1, 1]
    assert batch.token_ids.tolist() == [10, 11, 12, 13, 10, 11, 12, 10, 11, 12, 13, 14]
    assert batch.loss_mask.tolist() == [bool(x) for x in (0, 0, 1, 1, 0, 0, 1, 0, 0, 1, 1, 1)]
    assert batch.versions.tolist() == [-1, -1, 3, 3, -1, -1, 7, -1, -1, 3, 3, 3]
    assert batch.temperatures == pytest.approx([0.7] * 3)


def test_log_probs_of_tokens_nobody_sampled_become_zero() -> None:
    batch = batching.pack([group(trajectory())])
    assert batch.rollout_logprobs.tolist() == [0, 0, -0.5, -0.5]


def test_temperature_zero_is_stored_as_one() -> None:
    assert batching.pack([group(trajectory(temperature=0.0))]).temperatures.tolist() == [1.0]


def test_failures_aborts_and_unscored_rows_stay_out() -> None:
    failed = trajectory(status=Status.FAILED, failure=Failure(boundary=Boundary.ENGINE, message="gone"))
    rows = (failed, trajectory(status=Status.ABORTED), trajectory(reward=None), trajectory(status=Status.TRUNCATED))
    assert batching.pack([group(*rows)]).num_sequences == 1


def test_a_batch_of_nothing_is_an_error() -> None:
    with pytest.raises(RunError, match="batch is empty"):
        batching.pack([group(trajectory(reward=None))])


def test_a_row_that_breaks_the_tokens_contract_is_refused() -> None:
    with pytest.raises(ContractError, match="trained but was not sampled"):
        batching.pack([group(trajectory(loss_mask=np.ones(4, dtype=np.bool_)))])


def test_tokens_sampled_before_any_publish_are_refused() -> None:
    with pytest.raises(ContractError, match="before any weights were published"):
        batching.pack([group(trajectory(version=-1))])


def test_stages_that_were_forgotten_show_as_nan() -> None:
    batch = batching.pack([group(trajectory())])
    assert np.isnan(batch.advantages).all()
    assert np.isnan(batch.token_weights).all()
    assert batch.correction_weights.tolist() == [1.0] * 4


# --- conservation -----------------------------------------------------------------------------------------------------


def routes(length: int, experts: int = 2) -> np.ndarray[Any, np.dtype[np.int16]]:
    return np.arange((length - 1) * 3 * experts, dtype=np.int16).reshape(length - 1, 3, experts)


def test_routes_reach_the_batch_beside_their_tokens() -> None:
    batch = batching.pack([group(trajectory(4, routes=routes(4)), trajectory(3, routes=routes(3)))])
    assert batch.routes is not None
    assert batch.routes.shape == (7, 3, 2)
    assert (batch.routes[:3] == routes(4)).all()
    assert (batch.routes[4:6] == routes(3)).all()


def test_a_row_without_routes_is_unrecorded_and_nothing_is_made_up() -> None:
    batch = batching.pack([group(trajectory(4, routes=routes(4)), trajectory(session_id="bare"))])
    assert batch.routes is not None
    assert recorded_rows(batch.routes).tolist() == [True] * 3 + [False] * (batch.num_tokens - 3)


def test_routes_of_two_shapes_are_refused() -> None:
    with pytest.raises(ContractError, match="routes"):
        batching.pack([group(trajectory(routes=routes(4)), trajectory(routes=routes(4, experts=1)))])


def test_an_array_smuggled_through_metadata_is_refused() -> None:
    with pytest.raises(ContractError, match="pixel_values"):
        batching.pack([group(trajectory(metadata={"pixel_values": np.zeros(4)}))])


@pytest.mark.parametrize("lost", ["routes", "token_ids", "loss_mask", "versions"])
def test_a_batch_that_lost_something_is_named(lost: str) -> None:
    rows = [trajectory(4, routes=routes(4))]
    batch = batching.pack([group(*rows)])
    damage: dict[str, Any] = {
        "routes": None,
        "token_ids": np.zeros_like(batch.token_ids),
        "loss_mask": np.zeros_like(batch.loss_mask),
        "versions": np.full_like(batch.versions, -1),
    }
    with pytest.raises(ContractError, match={"versions": "sampled"}.get(lost, lost)):
        batching.check_conservation(rows, replace(batch, **{lost: damage[lost]}))


def test_every_field_of_a_trajectory_has_a_place_or_is_left_behind_on_purpose() -> None:
    fields = {field.name for field in dataclasses.fields(Trajectory)}
    assert fields == set(batching.CARRIED) | batching.LEFT_BEHIND
    assert set(batching.CARRIED.values()) <= {field.name for field in dataclasses.fields(TrainBatch)}


# --- filling ----------------------------------------------------------------------------------------------------------


def two_groups() -> TrainBatch:
    return batching.pack(
        [
            group(trajectory(4, reward=1.0), trajectory(5, reward=0.0)),
            group(trajectory(3, reward=2.0), trajectory(3, reward=4.0)),
        ]
    )


def test_the_rollout_can_be_the_old_policy() -> None:
    batch = batching.with_old_logprobs(two_groups(), None)
    assert batch.old_logprobs is batch.rollout_logprobs


def test_log_probs_of_another_batch_or_with_nan_are_refused() -> None:
    batch = two_groups()
    with pytest.raises(ContractError, match="does not belong"):
        batching.with_old_logprobs(batch, np.zeros(3, dtype=np.float32))
    values = np.full(batch.num_tokens, np.nan, dtype=np.float32)
    with pytest.raises(ContractError, match="not finite"):
        batching.with_ref_logprobs(batch, values)
    outside = np.where(batch.loss_mask, -1.0, np.nan).astype(np.float32)
    assert np.isfinite(batching.with_old_logprobs(batch, outside).old_logprobs).all()  # type: ignore[arg-type]


def test_advantages_reach_their_tokens() -> None:
    batch = batching.with_advantages(two_groups(), advantages.grpo, {"std": False})
    trained = batch.advantages[batch.loss_mask]
    assert trained.tolist() == [0.5, 0.5, -0.5, -0.5, -0.5, -1.0, 1.0]
    assert (batch.advantages[~batch.loss_mask] == 0).all()


def test_kl_in_the_reward_is_that_of_the_old_policy_times_its_coefficient() -> None:
    batch = two_groups()
    batch = batching.with_old_logprobs(batch, None)
    batch = batching.with_ref_logprobs(batch, batch.rollout_logprobs - np.float32(0.25))
    kl = batching.kl_in_reward(batch, coef=0.5)
    assert kl[batch.loss_mask] == pytest.approx(0.125)
    assert (kl[~batch.loss_mask] == 0).all()
    shaped = batching.with_advantages(batch, advantages.dr_grpo, kl=kl)
    # Sequence KL: 2 and 3 trained tokens of 0.125.
    assert shaped.advantages[batch.loss_mask][:2] == pytest.approx((1 - 0.25) - (0.75 - 0.375) / 2)


def _nan(inputs: AdvantageInputs, /) -> torch.Tensor:
    return inputs.rewards[inputs.sequence_ids] / 0 * 0


def _unmasked(inputs: AdvantageInputs, /) -> torch.Tensor:
    return inputs.rewards[inputs.sequence_ids]


def _per_sequence(inputs: AdvantageInputs, /) -> torch.Tensor:
    return inputs.rewards


@pytest.mark.parametrize(
    ("fn", "says"), [(_nan, "NaN"), (_unmasked, "outside the mask"), (_per_sequence, "wrong shape")]
)
def test_an_advantage_that_breaks_its_protocol_is_named(fn: Any, says: str) -> None:
    with pytest.raises(PluginError, match=rf"{fn.__name__}.*{says}"):
        batching.with_advantages(two_groups(), fn)


def test_corrections_multiply_and_report_means_over_trained_tokens() -> None:
    batch = two_groups()
    old = np.where(batch.loss_mask, batch.rollout_logprobs + np.float32(np.log(1.5)), 5.0).astype(np.float32)
    batch = batching.with_old_logprobs(batch, old)
    cap = {"level": "token", "action": "truncate", "low": 0.0, "high": 1.2}
    picks = [("tis", corrections.tis, {}), ("importance", corrections.importance, cap)] * 2
    corrected, metrics = batching.with_corrections(batch, picks)
    assert corrected.correction_weights[batch.loss_mask] == pytest.approx((1.5 * 1.2) ** 2)
    assert (corrected.correction_weights[~batch.loss_mask] == 1).all()
    assert metrics["correction/tis/ratio"] == pytest.approx(1.5)
    assert metrics["correction/importance/clipped_fraction"] == 1.0
    assert metrics["correction/importance-2/weight"] == pytest.approx(1.2)


def test_corrections_without_old_log_probs_are_an_error() -> None:
    with pytest.raises(RunError, match="corrections need"):
        batching.with_corrections(two_groups(), [("tis", corrections.tis, {})])


def test_token_weights_of_an_update_sum_to_one() -> None:
    batch = batching.with_token_weights(two_groups(), "sequence-mean-token-mean")
    assert batch.token_weights.sum() == pytest.approx(1.0)


# --- splitting --------------------------------------------------------------------------------------------------------


def test_updates_split_by_whole_groups_and_need_weights_of_their_own() -> None:
    batch = two_groups()
    first, second = batching.split_updates(batch, 2)
    assert first.group_ids.tolist() == [0, 0]
    assert second.group_ids.tolist() == [1, 1]
    assert np.isnan(first.token_weights).all()
    assert batching.with_token_weights(second, "token-mean").token_weights.sum() == pytest.approx(1.0)


def test_more_updates_than_groups_is_an_error() -> None:
    with pytest.raises(RunError, match="cannot be split"):
        batching.split_updates(two_groups(), 3)


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), max_size=30),
    world_size=st.integers(1, 5),
    budget=st.integers(1, 60),
)
def test_plans_tile_the_sequences_within_the_budget_and_level_the_ranks(
    lengths: list[int], world_size: int, budget: int
) -> None:
    plan = batching.plan_micro_batches(lengths, world_size, budget)
    assert len(plan) == world_size
    assert len({len(rank) for rank in plan}) == 1
    assert len(plan[0]) >= 1
    everything = sorted(sequence for rank in plan for micro in rank for sequence in micro)
    assert everything == list(range(len(lengths)))
    for rank in plan:
        for micro in rank:
            assert sum(lengths[s] for s in micro) <= budget or len(micro) == 1
    if len(lengths) >= world_size:
        assert all(any(rank) for rank in plan)  # nobody idles while there is a sequence for each
    assert plan == batching.plan_micro_batches(np.array(lengths, dtype=np.int64), world_size, budget)


def test_an_oversize_sequence_sits_alone() -> None:
    plan = batching.plan_micro_batches([3, 15, 4], 1, 10)
    assert sorted(plan[0]) == [[0, 2], [1]]


def test_equal_sequences_are_dealt_equally() -> None:
    plan = batching.plan_micro_batches([5] * 8, 2, 10)
    assert [[len(micro) for micro in rank] for rank in plan] == [[2, 2], [2, 2]]


def test_no_more_micro_batches_than_decreasing_order_needs() -> None:
    # In order of arrival first-fit opens a bin more: 4+5, 4+5, 6, 6 against 6+4, 6+4, 5+5.
    assert len(batching.plan_micro_batches([4, 5, 4, 5, 6, 6], 1, 10)[0]) == 3


def test_no_rank_carries_much_more_than_the_mean() -> None:
    lengths = np.random.default_rng(0).integers(2000, 6000, 32)
    for world_size in (2, 4, 8):
        plan = batching.plan_micro_batches(lengths, world_size, 9216)
        loads = [sum(int(lengths[s]) for micro in rank for s in micro) for rank in plan]
        assert max(loads) <= 1.1 * sum(loads) / world_size


def test_micro_batches_are_levelled_below_the_budget() -> None:
    plan = batching.plan_micro_batches([6, 5, 4, 3, 2, 2], 2, 20)  # first-fit alone: 20 and 2
    assert sorted(sum([6, 5, 4, 3, 2, 2][s] for s in micro) for rank in plan for micro in rank) == [11, 11]
