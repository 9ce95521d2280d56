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


@pytest.mark.slow
def test_two_ranks_publish_their_shares_of_a_difference_and_two_engines_load_it(workspace: Workspace) -> None:
    pytest.importorskip("ray", reason="executor ray needs ray")
    published = workspace.folder / "published"
    delta = {"use": "disk-delta", "publish_dir": str(published), "local_dir": str(workspace.folder / "local")}
    workspace.train(
        overrides={
            "schedule.steps": 1,
            "executor": "ray",
            "transport": delta,
            "placement.mode": "separate",
            "placement.trainer_ranks": 2,
            "placement.engines": 2,
            "check_weight_update_equal": True,
        }
    )
    timings = workspace.lines("timings.jsonl")[-1]
    assert 0 < timings["sync/density"] <= 1
    assert timings["sync/verified_tensors"] > 0
    listings = sorted(path.name for path in published.glob("*/weight_v000001/rank-*.json"))
    assert listings == ["rank-00000.json", "rank-00001.json"]
