"""`miles plan` as people call it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from miles_core.cli import main
from miles_core.planning.memory import Layout, Work, megatron
from miles_core.planning.sizes import read_sizes
from miles_core.testing.tiny import make_tiny_model

JOB = ("--peak-tokens-s", "1000", "--train-s", "10", "--steps", "10")


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["plan", *arguments])
    assert result.exit_code == code, result.output
    return result.output


def rows(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json"))


def test_memory_is_that_of_the_model_and_layout(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, architecture="qwen3-moe", layers=4)
    cuts = {"pipeline_parallel": 2, "expert_parallel": 2, "context_parallel": 2, "distributed_optimizer": "true"}
    given = [part for key, value in cuts.items() for part in ("--set", f"backend.{key}={value}")]
    found = rows("memory", str(folder), "--backend", "megatron", "--gpus", "8", *given)
    layout = Layout(gpus=8, pp=2, ep=2, cp=2, distributed_optimizer=True)
    work = Work(micro_batch_tokens=4096, logits_chunk_tokens=1024, precision="float32")
    assert found["total"] == megatron(read_sizes(folder), layout, work).total
    assert found["total"] == sum(found["items"].values())


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (("--set", "backend.tensor_parallel=2"), "unknown key"),
        (("--set", "backend.dp_replicate=2"), "2 replicas over 1 trainer ranks"),
        (("--set", "schedule.steps=1"), "keys of the backend"),
        (("--set", "backend=megatron"), "keys of the backend"),
        (("--backend", "megatron", "--gpus", "3", "--set", "backend.tensor_parallel=2"), "for 3 trainer ranks"),
        (("--backend", "megatron", "--gpus", "3", "--set", "backend.pipeline_parallel=3"), "2 layers over 3 pieces"),
        (("--backend", "megatron", "--gpus", "2", "--set", "backend.expert_parallel=2"), "a model without experts"),
    ],
)
def test_what_the_backend_does_not_take_is_refused(tmp_path: Path, arguments: tuple[str, ...], found: str) -> None:
    assert found in " ".join(run("memory", str(make_tiny_model(tmp_path)), *arguments, code=2).split())


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    assert "config.json is missing" in run("memory", str(tmp_path), code=2)


def test_sync_recommends_the_soonest_complete() -> None:
    near = rows("sync", "--gigabytes", "60")
    far = rows("sync", "--gigabytes", "470", "--trainer-nodes", "8", "--trainer-pp", "4", "--engine-nodes", "8")
    assert near["recommendation"] == "broadcast"
    assert far["recommendation"] == "p2p"
    totals = [each["total_s"] for each in far["estimates"]]
    assert totals == sorted(totals)


def test_sync_takes_the_bytes_of_a_model_folder(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, dtype="float32")
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    wire = rows("sync", "--model", str(folder))["estimates"][0]["wire_bytes"]
    assert wire == pytest.approx(stored, rel=0.1)  # the header of the file is small


@pytest.mark.parametrize("arguments", [(), ("--gigabytes", "1", "--model", "m")])
def test_sync_wants_exactly_one_size(arguments: tuple[str, ...]) -> None:
    assert "either --model or --gigabytes" in run("sync", *arguments, code=2)


def test_async_compares_the_schedules() -> None:
    by_mode = {each["mode"]: each for each in rows("async", *JOB, "--wait-s", "5:10")}
    assert set(by_mode) == {"sync", "one-step-off", "fully-async"}
    assert by_mode["sync"]["step_s"] > by_mode["one-step-off"]["step_s"] >= by_mode["fully-async"]["step_s"]
    assert by_mode["sync"]["staleness_max"] == 0


def test_async_scales_devices_with_their_work() -> None:
    one, four = rows("async", *JOB, "--mode", "fully-async", "--tokens", "100", "--scale", "1,4")
    assert four["step_s"] == pytest.approx(one["step_s"], rel=0.1)
    assert four["tokens_per_s"] == pytest.approx(4 * one["tokens_per_s"], rel=0.1)


@pytest.mark.parametrize("bad", [("--tokens", "ten"), ("--wait-s", "1:0.5"), ("--scale", "1,x")])
def test_async_names_what_it_cannot_read(bad: tuple[str, str]) -> None:
    assert bad[1] in run("async", *JOB, *bad, code=2)


def test_a_budget_below_a_group_is_refused() -> None:
    assert "holds no group" in run("async", *JOB, "--max-concurrent-samples", "2", code=2)


@pytest.mark.parametrize(
    "arguments",
    [
        ("sync", "--gigabytes", "nan"),
        ("sync", "--gigabytes", "inf"),
        ("sync", "--gigabytes", "1", "--density", "nan"),
        ("async", *JOB, "--publish-s", "nan"),
        ("async", *JOB, "--tokens", "nan"),
        ("async", *JOB, "--tokens", "10:inf"),
        ("async", *JOB, "--scale", "0"),
        ("async", *JOB, "--scale", "1,two"),
    ],
)
def test_what_no_forecast_can_use_is_refused(arguments: tuple[str, ...]) -> None:
    assert "Error: Invalid value for" in run(*arguments, code=2)


def test_sync_names_a_model_folder_without_config(tmp_path: Path) -> None:
    assert "config.json is missing" in run("sync", "--model", str(tmp_path), code=2)


def test_engines_on_shared_devices_have_no_nodes_of_their_own() -> None:
    shared = ("sync", "--gigabytes", "1", "--fabric", "shared-device")
    assert "--engine-nodes" in run(*shared, "--engine-nodes", "2", code=2)
    one, four = (rows(*shared, "--engines", number)["estimates"][0]["pause_s"] for number in ("1", "4"))
    assert four > one
