"""Whole runs with `precision.true_on_policy`: the log-probs of engine and trainer are equal, bit for bit.

The runs change weights at every step, several answers decode together while the trainer packs them otherwise, and
prompts share prefixes through the engine's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miles_core.testing.tiny import make_tiny_model

from .conftest import Workspace, make_workspace

EXACT = {"precision.true_on_policy": True}
BUSY = {
    "schedule": {"steps": 10, "groups_per_step": 2, "group_size": 4},
    "rollout.sampling": {"max_tokens": 16, "temperature": 0.7},
    "engine": {"use": "local", "max_batch_size": 5, "prefill_tokens": 16},
    "backend": {"use": "fsdp", "micro_batch_tokens": 64, "logprob_chunk_tokens": 16},
    "eval.every_steps": 10,
    "checkpoint.every_steps": None,
}
"""Ten updates; decoding in fives, prefill in pieces, micro-batches and chunks of other sizes."""
ALSO_SLOWLY = [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"]
TWO_RANKS = {"executor": "ray", "transport": "broadcast", "placement.trainer_ranks": 2, "schedule.steps": 3}


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Workspace]:
    def workspace(dtype: Any, **model: Any) -> Workspace:
        folder = make_tiny_model(tmp_path / dtype, architecture="qwen3", dtype=dtype, **model)
        (tmp_path / f"run-{dtype}").mkdir()
        return make_workspace(tmp_path / f"run-{dtype}", folder)

    return workspace


def differences(workspace: Workspace) -> list[float]:
    return [line["contract/logprobs/abs_diff_max"] for line in workspace.lines()[1:]]


@pytest.mark.parametrize("dtype", ALSO_SLOWLY)
def test_ten_updates_without_a_difference_in_the_last_bit(make: Callable[..., Workspace], dtype: str) -> None:
    workspace = make(dtype)
    workspace.train(overrides=BUSY | EXACT)
    assert differences(workspace) == [0.0] * 10
    norms = [line["train/grad_norm"] for line in workspace.lines()[1:]]
    assert all(norm > 0 for norm in norms), "the weights did not change, so nothing was shown"


@pytest.mark.parametrize("dtype", ALSO_SLOWLY)
def test_without_the_switch_the_same_run_shows_a_difference(make: Callable[..., Workspace], dtype: str) -> None:
    workspace = make(dtype)
    workspace.train(overrides=BUSY | {"schedule.steps": 1})
    assert differences(workspace)[0] > 0.0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_sharded_ranks_and_an_engine_in_its_own_process(make: Callable[..., Workspace], dtype: str) -> None:
    workspace = make(dtype)
    workspace.train(overrides=BUSY | EXACT | TWO_RANKS)
    assert differences(workspace) == [0.0] * 3


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["one-step-off", "fully-async"])
def test_staleness_shows_beside_a_difference_of_zero(make: Callable[..., Workspace], mode: str) -> None:
    workspace = make("bfloat16")
    workspace.train(overrides=BUSY | EXACT | {"schedule.mode": mode, "placement.mode": "separate", "schedule.steps": 6})
    lines = workspace.lines()[1:]
    fresh = [line["contract/logprobs/abs_diff_max_fresh"] for line in lines if line["contract/logprobs/fresh_fraction"]]
    assert set(fresh) == {0.0}
    stale = [line for line in lines if line["contract/logprobs/fresh_fraction"] < 1]
    assert stale, "every token was fresh, so nothing was shown"
    assert all(line["contract/logprobs/abs_diff_max"] > 0 for line in stale)
