"""Two ranks compute what one computes. They start once and run every scenario; the tests read what they found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles_core.testing.backend_oracle import expected_update
from miles_core.testing.replay import routed_batch
from miles_core.testing.tiny import make_tiny_model
from miles_core.testing.together import DEVICES, run_ranks

from . import ranks

ROUNDING = {"cpu": 1e-6, "cuda": 1e-5}
"""Relative to the largest gradient; models take norms and rotary tables in float32, which a GPU rounds otherwise."""
Results = tuple[dict[str, Any], dict[str, Any]]


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(device: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two-ranks")
    make_tiny_model(folder / "model", dtype="float64", context=64)
    make_tiny_model(folder / "model32", dtype="float32", context=64)
    for dtype in ("float32", "bfloat16"):
        make_tiny_model(folder / dtype, dtype=dtype, architecture="qwen3", context=64)
    make_tiny_model(folder / "experts", dtype="float64", architecture="qwen3-moe", tie=False)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    """One rank trains two steps, saves, and goes on; run before the pair, which loads what it saved."""
    first, second, third, fourth = ranks.batches(4)
    made = ranks.backend(folder, 0, 1, optimizer=ranks.TRAINING)
    for batch in (first, second):
        made.train_step(batch)
    made.save(folder / "from-one")
    return ranks.continue_training(made, [third, fourth])


@pytest.fixture(scope="module")
def both(folder: Path, alone: dict[str, Any], device: str) -> Results:
    run_ranks(Path(ranks.__file__), folder, 2, [device], strict=device == "cpu")
    loaded = [torch.load(folder / f"results-{rank}.pt", weights_only=False) for rank in (0, 1)]
    return loaded[0], loaded[1]


@pytest.mark.parametrize("how", ["sharded", "replicated", "checkpointed", "one sequence", "experts", "replayed"])
def test_gradient_over_two_ranks_is_that_of_one_batch_in_float64(
    folder: Path, both: Results, device: str, how: str
) -> None:
    batch = routed_batch() if how == "replayed" else ranks.batches(1)[0]
    expected = expected_update(
        folder / ("experts" if how in ("experts", "replayed") else "model"),
        batch.select([2]) if how == "one sequence" else batch,
        ranks.LOSS,
        given_experts=how == "replayed",
    )
    found = both[0][how]
    for name in ("loss", "entropy", "kl", "grad_norm"):
        assert found["metrics"][name] == pytest.approx(getattr(expected, name), rel=ROUNDING[device]), name
    largest = max(float(g.abs().max()) for g in expected.gradients.values())
    compared = 0
    for name, gradient in expected.gradients.items():
        if name in found["before"]:  # experts are exported one by one; their norm is compared above
            moved = found["before"][name] - found["after"][name]
            assert float((moved / (1 - moved.abs()) - gradient).abs().max()) < ROUNDING[device] * largest, name
            compared += 1
    assert compared >= len(expected.gradients) - 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_true_on_policy_log_probs_are_those_of_one_rank_bit_for_bit(
    folder: Path, both: Results, device: str, dtype: str
) -> None:
    if device == "cuda" and dtype == "float32":
        pytest.skip("on a GPU, true-on-policy is for bfloat16")
    made = ranks.backend(
        folder, 0, 1, model=dtype, param_dtype="checkpoint", micro_batch_tokens=4096, exact=True, device=device
    )
    batch = ranks.batches(1)[0]
    alone = made.log_probs(batch)
    assert np.count_nonzero(alone) == batch.num_loss_tokens
    assert np.array_equal(both[0][f"exact {dtype}"], alone)


def test_routes_are_counted_once_over_ranks(folder: Path, both: Results) -> None:
    made = ranks.backend(folder, 0, 1, model="experts", routes="record", micro_batch_tokens=1)
    made.log_probs(routed_batch())
    assert both[0]["route counts"] == both[1]["route counts"] == made.route_counts()


def test_both_ranks_report_and_export_the_same(both: Results) -> None:
    for how in ("sharded", "replicated", "one sequence", "experts", "bfloat16"):
        first, second = both[0][how], both[1][how]
        assert first["metrics"] == second["metrics"], how
        assert first["after"].keys() == second["after"].keys()
        assert all(torch.equal(first["after"][name], second["after"][name]) for name in first["after"]), how


def test_bfloat16_compute_keeps_float32_masters(both: Results) -> None:
    found, exact = both[0]["bfloat16"], both[0]["sharded"]
    assert found["metrics"]["loss"] == pytest.approx(exact["metrics"]["loss"], rel=0.05)
    name = "model.norm.weight"
    moved = {
        how: both[0][how]["after"][name].double() - both[0][how]["before"][name] for how in ("bfloat16", "sharded")
    }
    assert torch.nn.functional.cosine_similarity(moved["bfloat16"], moved["sharded"], dim=0) > 0.99
    assert found["after"][name].dtype == torch.float32
    assert not torch.equal(found["after"][name], found["after"][name].bfloat16().float())


def test_log_probs_are_complete_on_rank_0_and_equal_those_of_each_sequence_alone(folder: Path, both: Results) -> None:
    expected = expected_update(folder / "model", ranks.batches(1)[0], ranks.LOSS).logprobs
    assert np.abs(both[0]["log_probs"] - expected).max() < 1e-6
    assert np.array_equal(both[0]["reference"], both[0]["log_probs"])


def test_a_nan_on_one_rank_makes_both_skip_or_both_stop(both: Results) -> None:
    for rank in (0, 1):
        assert both[rank]["skipped"] == both[0]["skipped"]
        assert both[rank]["unchanged"]
        assert both[rank]["stopped"] == both[0]["stopped"]
    named = [rank for rank in (0, 1) if f"rank {rank}: the loss" in both[0]["stopped"]]
    assert len(named) == 1, "exactly one rank had the NaN in its own loss"


def test_two_ranks_resume_bit_for_bit(both: Results) -> None:
    straight, resumed = both[0]["straight"], both[0]["resumed"]
    assert straight["metrics"] == resumed["metrics"]
    assert all(torch.equal(straight["after"][name], resumed["after"][name]) for name in straight["after"])


def test_a_checkpoint_of_one_rank_continues_on_two(both: Results, alone: dict[str, Any], device: str) -> None:
    _assert_close(both[0]["from one"], alone, device)


def test_a_checkpoint_of_two_ranks_continues_on_one(folder: Path, both: Results, device: str) -> None:
    made = ranks.backend(folder, 0, 1, optimizer=ranks.TRAINING)
    made.load(folder / "from-two")
    _assert_close(ranks.continue_training(made, ranks.batches(4)[2:]), both[0]["straight"], device)


def test_two_ranks_write_one_folder_that_transformers_loads(folder: Path, both: Results) -> None:
    batch = ranks.batches(1)[0]
    reread = expected_update(folder / "hf", batch, ranks.LOSS).logprobs
    assert np.array_equal(reread, expected_update(folder / "model", batch, ranks.LOSS).logprobs)


def test_replicas_that_do_not_divide_the_ranks_are_refused(both: Results) -> None:
    assert "backend.dp_replicate to divide placement.trainer_ranks (2)" in both[0]["indivisible"]


def _assert_close(found: dict[str, Any], expected: dict[str, Any], device: str) -> None:
    # Adam turns the rounding of a gradient near 0 into a whole step, so weights tell less than figures on a GPU.
    figures, weights = (1e-9, 1e-9) if device == "cpu" else (1e-4, 2e-2)
    for ours, theirs in zip(found["metrics"], expected["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=figures)
    for name, tensor in expected["after"].items():
        assert torch.allclose(found["after"][name], tensor, rtol=0, atol=weights), name
