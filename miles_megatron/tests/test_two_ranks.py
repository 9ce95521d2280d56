"""Every layout of two ranks against fsdp on one: the same log-probs, loss, figures and gradient of the same batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import miles_megatron.start  # noqa: F401
from miles_core.config.load import parse
from miles_core.driver.convert import to_run
from miles_core.planning.memory import Layout
from miles_core.planning.sizes import read_sizes
from miles_core.testing.backend import gradients_of, weights
from miles_core.testing.live_bytes import TOKENS, Case
from miles_core.testing.tiny import write_tiny_tokenizer
from miles_core.testing.together import DEVICES
from miles_core.types import TrainBatch
from miles_fsdp.backend import FsdpBackend
from miles_fsdp.options import FsdpOptions
from miles_megatron.memory import plan

from . import scenarios
from .models import write_models, write_sparse
from .together import run_ranks

TOLERANCE = 1e-5
"""float32; of gradients relative to the largest."""


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


RUN_FILE = """
name: converted
model: {folder}/qwen3-moe
data: {folder}/rows.jsonl
rewards: ['{folder}/reward.py:score']
rollout: {{sampling: {{max_tokens: 8}}}}
schedule: {{steps: 1, groups_per_step: 1, group_size: 2}}
backend: {{use: megatron, distributed_optimizer: true}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_models(tmp_path_factory.mktemp("ranks"))
    write_sparse(folder / "other", "qwen3-moe", seed=2)
    for name, hidden in scenarios.MEMORY_OF.items():
        Case(name, "float32", False, hidden).write(folder / f"memory-{name}")
    write_tiny_tokenizer(folder / "qwen3-moe")
    (folder / "rows.jsonl").write_text('{"prompt": "one"}\n')
    (folder / "reward.py").write_text("def score(scored):\n    return 0.0\n")
    to_run(folder / "other", folder / "converted", parse(RUN_FILE.format(folder=folder)))
    return folder


@pytest.fixture(scope="module")
def found(folder: Path, device: str) -> dict[str, list[Any]]:
    return run_ranks(folder, 2, (*scenarios.FAST, *scenarios.REPLAYED, *scenarios.OTHERS), device=device)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    (batch,) = scenarios.batches(1)
    made = {name: fsdp_update(folder, name, batch) for name in {scenario.split()[0] for scenario in scenarios.FAST}}
    for scenario in scenarios.REPLAYED:
        name = scenario.split()[0]
        layers = {"qwen3-moe": 4, "deepseek-v3": 3}[name]
        routed = scenarios.routed(batch, layers, 8, 2)
        made[f"{name} replay"] = fsdp_update(folder, name, routed, routes="replay")
    return made


def fsdp_update(folder: Path, model: str, batch: TrainBatch, **changes: Any) -> dict[str, Any]:
    context = scenarios.Place(0, 1, folder, "cpu").context(model, **changes)
    made = FsdpBackend(FsdpOptions(param_dtype="float32", micro_batch_tokens=20), context)
    logprobs, before = made.log_probs(batch), weights(made)
    metrics = dict(made.train_step(batch).values)
    gradients = gradients_of(before, weights(made), scenarios.PROBE)
    found = {"logprobs": logprobs, "before": before, "metrics": metrics, "gradients": gradients}
    return {**found, "counts": made.route_counts()}


def assert_same_update(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert np.abs(found["logprobs"] - expected["logprobs"]).max() < TOLERANCE
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=TOLERANCE)
    gradients = gradients_of(found["before"], found["after"], scenarios.PROBE)
    assert gradients.keys() == expected["gradients"].keys()
    largest = max(float(g.abs().max()) for g in expected["gradients"].values())
    for name, gradient in expected["gradients"].items():
        assert float((gradients[name] - gradient).abs().max()) < TOLERANCE * largest, name


@pytest.mark.parametrize("scenario", scenarios.FAST)
class TestTwoRanks:
    def test_the_update_is_that_of_fsdp(
        self, found: dict[str, list[Any]], expected: dict[str, Any], scenario: str
    ) -> None:
        for rank in found[scenario]:
            assert_same_update(rank, expected[scenario.split()[0]])

    def test_export_is_the_checkpoint_bit_for_bit(
        self, found: dict[str, list[Any]], expected: dict[str, Any], scenario: str
    ) -> None:
        for rank in found[scenario]:
            before = expected[scenario.split()[0]]["before"]
            assert rank["before"].keys() == before.keys()
            for name, tensor in before.items():
                assert torch.equal(rank["before"][name], tensor), name


@pytest.mark.parametrize("scenario", scenarios.REPLAYED)
def test_replayed_routes_give_fsdps_update(
    found: dict[str, list[Any]], expected: dict[str, Any], scenario: str
) -> None:
    reference = expected[f"{scenario.split()[0]} replay"]
    plain = expected[scenario.split()[0]]
    assert np.abs(reference["logprobs"] - plain["logprobs"]).max() > 0.01, "the routes change nothing"
    for rank in found[scenario]:
        assert_same_update(rank, reference)
        assert rank["counts"] == reference["counts"]
        assert rank["counts"].own_differs > 0


def test_a_run_resumes_bit_for_bit_and_under_other_layouts(found: dict[str, list[Any]], folder: Path) -> None:
    first = found["trained tp2"][0]
    assert first["resumed"] == first["straight"]
    assert all(torch.equal(first["after"][n], t) for n, t in first["resumed after"].items())
    alone = scenarios.ALL["continued alone"](scenarios.Place(0, 1, folder, "cpu"))
    for other in (found["continued ep2"][0], found["continued pp2"][1], alone):
        for step, metrics in enumerate(other["metrics"]):
            assert metrics == pytest.approx(first["straight"][step], rel=1e-4)
        for name, tensor in other["after"].items():
            assert torch.allclose(tensor, first["after"][name], atol=1e-3), name


@pytest.mark.parametrize("scenario", scenarios.CONVERTED)
def test_a_converted_folder_goes_on_under_every_layout_as_from_the_folder(
    found: dict[str, list[Any]], folder: Path, scenario: str
) -> None:
    wanted = load_file(folder / "other" / "model.safetensors")
    context = scenarios.Place(0, 1, folder, "cpu").context("other", optimizer=scenarios.TRAINING)
    made = FsdpBackend(FsdpOptions(param_dtype="float32", micro_batch_tokens=20), context)
    straight = [dict(made.train_step(batch).values) for batch in scenarios.batches(2)]
    for rank in found[scenario]:
        assert rank["exported"].keys() == wanted.keys()
        assert all(torch.equal(rank["exported"][name], tensor) for name, tensor in wanted.items())
        for step, metrics in enumerate(straight):
            assert rank["metrics"][step] == pytest.approx(metrics, rel=1e-4)


@pytest.mark.parametrize("scenario", scenarios.MEMORY)
def test_the_plan_of_two_ranks_is_within_a_tenth_of_the_measured_peak(
    found: dict[str, list[Any]], folder: Path, device: str, scenario: str
) -> None:
    if device == "cuda":
        pytest.skip("live tensors are counted on CPUs")
    model, options = scenarios.MEMORY[scenario]
    settings = scenarios.memory_options(**options)
    planned = plan(settings, read_sizes(folder / f"memory-{model}"), 2, False)
    sent = 0.0
    if planned.stage is not None:  # on a CPU, outputs of stages live until their micro-batch comes back
        layout = Layout(gpus=2, pp=settings.pipeline_parallel, vpp=settings.virtual_pipeline)
        pieces = layout.waiting(planned.stage) * settings.virtual_pipeline
        sent = pieces * 4 * TOKENS * scenarios.MEMORY_OF[model]
    assert planned.total + sent == pytest.approx(max(found[scenario]), rel=0.10)


@pytest.mark.parametrize("scenario", ["refused pp2", "refused dp2"])
def test_all_ranks_refuse_a_nonfinite_step_together(found: dict[str, list[Any]], scenario: str) -> None:
    for skipped, unchanged, next_step in found[scenario]:
        assert skipped.startswith("not finite")
        assert (unchanged, next_step) == ("unchanged", "taken")


@pytest.mark.slow
@pytest.mark.parametrize("scenario", scenarios.FOUR)
def test_the_update_of_four_ranks_is_that_of_fsdp(folder: Path, expected: dict[str, Any], scenario: str) -> None:
    for rank in run_ranks(folder, 4, [scenario])[scenario]:
        assert_same_update(rank, expected[scenario.split()[0]])
