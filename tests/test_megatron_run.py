"""Whole runs with backend `megatron` on two ranks under executor `ray`: weights proven equal, figures those of fsdp."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from miles_core.testing.tiny import Architecture, make_tiny_model

from .conftest import Workspace, make_workspace

TENSOR = {"use": "megatron", "tensor_parallel": 2, "sequence_parallel": True, "distributed_optimizer": True}
EXPERT = {"use": "megatron", "expert_parallel": 2, "recompute": "full"}
STAGES = {"use": "megatron", "pipeline_parallel": 2}
TWO_RANKS = {
    "executor": "ray",
    "transport": "broadcast",
    "placement.mode": "separate",
    "placement.trainer_ranks": 2,
    "check_weight_update_equal": True,
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def workspace_of(folder: Path, architecture: Architecture) -> Workspace:
    model = make_tiny_model(folder / "weights", architecture=architecture, tie=False, overrides=HEADS)
    (folder / "run").mkdir()
    return make_workspace(folder / "run", model)


def train(workspace: Workspace, name: str, **overrides: Any) -> list[dict[str, Any]]:
    workspace.train(overrides={**TWO_RANKS, "name": name, "schedule.steps": 3, **overrides})
    assert any(event["event"] == "weights_equal" for event in workspace.lines("events.jsonl", name))
    return workspace.lines(name=name)


@pytest.mark.parametrize(
    ("architecture", "backend", "transport"), [("qwen3", TENSOR, "broadcast"), ("qwen3-moe", EXPERT, "disk-delta")]
)
def test_a_run_on_two_ranks_trains_as_fsdp_does(
    tmp_path: Path, architecture: Architecture, backend: dict[str, Any], transport: str
) -> None:
    pytest.importorskip("ray", reason="executor ray needs ray")
    workspace = workspace_of(tmp_path, architecture)
    expected = workspace.train(overrides={"name": "fsdp", "schedule.steps": 3, "transport": "inprocess"})
    assert expected.returncode == 0
    fsdp = workspace.lines(name="fsdp")
    where: Any = transport
    if transport == "disk-delta":
        folders = {"publish_dir": str(tmp_path / "published"), "local_dir": str(tmp_path / "local")}
        where = {"use": transport, **folders}
    found = train(workspace, "megatron", backend=backend, transport=where)
    assert [line["step"] for line in found] == [0, 1, 2, 3]
    for key in ("rollout/reward_mean", "train/loss", "train/grad_norm", "contract/tokens/trained_tokens"):
        # Step 1 samples from equal weights with equal seeds: the same tokens, hence the same figures.
        assert found[1][key] == pytest.approx(fsdp[1][key], rel=1e-3, abs=1e-5), key
    assert all(line["contract/logprobs/abs_diff_max"] < 1e-3 for line in found[1:])

    # The checkpoint of two ranks goes on as one.
    done = workspace.train("--resume", overrides={"name": "megatron", "schedule.steps": 4, "backend": "megatron"})
    assert "placement.trainer_ranks" in done.stdout + done.stderr
    assert workspace.lines(name="megatron")[:3] == found[:3]  # the last one is recorded again
    assert [line["step"] for line in workspace.lines(name="megatron")] == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_a_killed_run_goes_on_under_its_own_layout_and_another(tmp_path: Path) -> None:
    """Trainers alone resume bit for bit; here the engine batches requests as they come, and rounds accordingly."""
    pytest.importorskip("ray", reason="executor ray needs ray")
    workspace = workspace_of(tmp_path, "qwen3")
    tensor = {**TWO_RANKS, "backend": TENSOR}
    workspace.train(overrides={**tensor, "name": "straight"})
    straight = workspace.lines(name="straight")
    for number, backend in enumerate((TENSOR, STAGES)):
        # Each line opens the file twice: to see that the one before is whole, and to be appended.
        code = workspace.struck(signal.SIGKILL, 6, name="/metrics.jsonl", overrides=tensor)
        assert code == -signal.SIGKILL
        assert len(workspace.lines()) == 3
        workspace.train("--resume", overrides={**tensor, "backend": backend})
        resumed = workspace.lines()
        assert [line["step"] for line in resumed] == [line["step"] for line in straight]
        for ours, theirs in zip(resumed[1:], straight[1:], strict=True):
            assert ours["rollout/reward_mean"] == theirs["rollout/reward_mean"]
            for key in ("train/loss", "train/grad_norm", "train/entropy"):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-6), key
        workspace.directory().rename(workspace.directory(f"resumed-{number}"))
