"""Transports are one word in the run-file: whatever it is, a run computes the same, bit for bit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from miles_core.cli import main
from miles_core.config.load import load
from miles_core.driver.bench import candidates
from miles_core.registry import discover

if TYPE_CHECKING:
    from .conftest import Workspace


@pytest.fixture
def transports(workspace: Workspace) -> dict[str, Any]:
    folder = workspace.folder
    delta = {"use": "disk-delta", "publish_dir": str(folder / "published"), "local_dir": str(folder / "local")}
    return {"inprocess": "inprocess", "cuda-ipc": "cuda-ipc", "broadcast": "broadcast", "disk-delta": delta}


def train(workspace: Workspace, *arguments: str, **settings: Any) -> None:
    """`miles train` in this process: the start of an interpreter is not what is tested."""
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    result = CliRunner().invoke(main, ["train", str(workspace.run_file), "--plain", *sets, *arguments])
    assert result.exit_code == 0, result.output


def test_each_transport_gives_the_same_metrics_and_passes_the_check_of_every_tensor(
    workspace: Workspace, transports: dict[str, Any]
) -> None:
    metrics = {}
    for name, pick in transports.items():
        train(workspace, transport=pick, name=name, check_weight_update_equal=True, **{"schedule.steps": 1})
        metrics[name] = (workspace.directory(name) / "metrics.jsonl").read_bytes()
        assert any(event["event"] == "weights_equal" for event in workspace.lines("events.jsonl", name))
        timings = workspace.lines("timings.jsonl", name)[-1]
        assert {"sync/pause_s", "sync/verify_s", "sync/probe_gap", "sync/wire_bytes", "sync/skew_s"} <= timings.keys()
    assert set(metrics.values()) == {metrics["inprocess"]}


def test_a_resumed_run_publishes_its_difference_to_the_checkpoint(
    workspace: Workspace, transports: dict[str, Any]
) -> None:
    for steps, arguments in ((1, ()), (2, ("--resume",))):
        train(workspace, *arguments, transport=transports["disk-delta"], name="resumed", **{"schedule.steps": steps})
    assert [line["step"] for line in workspace.lines(name="resumed")] == [0, 1, 2]
    assert 0 < workspace.lines("timings.jsonl", "resumed")[-1]["sync/density"] <= 1


def test_bench_tries_what_is_usable_names_what_is_not_and_recommends_one(
    workspace: Workspace, transports: dict[str, Any]
) -> None:
    delta = {key: value for key, value in transports["disk-delta"].items() if key != "use"}
    arguments = ["bench", "transports", str(workspace.run_file), "--versions", "1", "--json"]
    result = CliRunner().invoke(main, [*arguments, "--with", f"disk-delta={json.dumps(delta)}"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.output[result.output.index("{") :])
    found = {each["name"]: each for each in told["transports"]}
    for name in transports:
        assert found[name]["figures"]["sync/pause_s"] > 0, found[name]
        assert found[name]["figures"]["sync/wire_bytes"] > 0
        assert found[name]["figures"]["sync/verify_s"] > 0
        parts = [found[name]["figures"][f"sync/{part}"] for part in ("stage_s", "activate_s", "verify_s")]
        assert found[name]["figures"]["update_s"] >= sum(parts)
    assert "colocated" in found["p2p"]["why_not"]
    assert told["recommended"] in transports
    assert "pause" in told["reason"]


def test_bench_names_the_option_that_a_transport_lacks(workspace: Workspace) -> None:
    _, refused = candidates(load(workspace.run_file), discover(), {})
    (why_not,) = [outcome.why_not for outcome in refused if outcome.name == "disk-delta"]
    assert why_not.startswith("publish_dir is missing")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["nosuch={a: 1}"], "no transport `nosuch`"),
        (["broadcast={use: inprocess}"], "a second time"),
        (["broadcast={wire: gloo}", "broadcast={timeout_s: 9}"], "a second time"),
    ],
)
def test_bench_refuses_options_that_it_would_not_use(workspace: Workspace, given: list[str], told: str) -> None:
    flags = [part for text in given for part in ("--with", text)]
    result = CliRunner().invoke(main, ["bench", "transports", str(workspace.run_file), *flags])
    assert result.exit_code == 2
    assert told in result.output
