"""Routes in whole runs of a small random Qwen3-MoE in bfloat16, whose engine and trainer batch differently."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from miles_core.testing.tiny import make_tiny_model

from .conftest import make_workspace

if TYPE_CHECKING:
    from .conftest import Workspace

MOE = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32}


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe") / "model"
    return make_tiny_model(folder, architecture="qwen3-moe", layers=4, dtype="bfloat16", overrides=MOE)


def metrics(workspace: Workspace, mode: str, **more: str) -> list[dict[str, Any]]:
    changes = {"rollout.routes": mode, "schedule.steps": 1, "rollout.sampling.max_tokens": 24, **more}
    workspace.train("--fresh", overrides=changes)
    return workspace.lines()[-1:]


def test_replay_makes_the_experts_equal_and_recording_counts_how_many_were_not(moe: Path, tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path, moe)
    recorded, replayed = metrics(workspace, "record"), metrics(workspace, "replay")
    assert all(line["contract/routes/coverage"] == 1 for line in (*recorded, *replayed))
    assert all(0 < line["contract/routes/different_fraction"] < 0.15 for line in recorded)
    assert all(line["contract/routes/different_fraction"] == 0 for line in replayed)
    assert replayed[0]["contract/logprobs/abs_diff_mean"] < recorded[0]["contract/logprobs/abs_diff_mean"]
    broken = [event for event in workspace.lines("events.jsonl") if event["event"] == "contract_broken"]
    assert broken == []


def test_megatron_replays_the_routes_of_probes_too(moe: Path, tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path, moe)
    replayed = metrics(workspace, "replay", backend="megatron")
    assert replayed[0]["contract/routes/different_fraction"] == 0
    gaps = [line["sync/probe_gap"] for line in workspace.lines("timings.jsonl")]
    assert 0 < max(gaps) < 0.03


def test_a_dense_model_is_refused_before_anything_starts(workspace: Workspace) -> None:
    done = workspace.train(overrides={"rollout.routes": "replay"}, code=2)
    assert "is dense: it has no experts" in done.stderr
    assert not workspace.directory().exists()
