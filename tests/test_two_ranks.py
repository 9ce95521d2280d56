"""The same run-file with `executor: ray`: two gloo ranks, an engine of its own, weights broadcast between processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .conftest import Workspace


def test_two_ranks_under_ray_train_like_one_rank_in_process(workspace: Workspace) -> None:
    pytest.importorskip("ray", reason="executor ray needs ray")
    short = {"schedule.steps": 2, "name": "one"}
    workspace.train(overrides=short)
    two = {
        **short,
        "name": "two",
        "executor": "ray",
        "transport": "broadcast",
        "placement.mode": "separate",
        "placement.trainer_ranks": 2,
        "check_weight_update_equal": True,
    }
    workspace.train(overrides=two)
    one_rank, two_ranks = workspace.lines(name="one"), workspace.lines(name="two")
    assert [line["step"] for line in one_rank] == [line["step"] for line in two_ranks]
    for key in ("rollout/reward_mean", "train/loss", "train/grad_norm", "contract/tokens/trained_tokens"):
        # Step 1 samples from equal weights with equal seeds: the same tokens, hence the same figures.
        assert two_ranks[1][key] == pytest.approx(one_rank[1][key], rel=1e-3, abs=1e-5), key
    assert all(line["contract/logprobs/abs_diff_max"] < 1e-3 for line in two_ranks[1:])
