"""Every layout of two ranks against fsdp on one: the same log-probs, loss, figures and gradient of the same batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import miles_megatron.start  # noqa: F401
from miles_core.testing.backend import gradients_of, weights
from miles_fsdp.backend import FsdpBackend
from miles_fsdp.options import FsdpOptions

from . import scenarios
from .models import write_models
from .together import run_ranks

TOLERANCE = 1e-5
"""float32; of gradients relative to the largest."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, list[Any]]:
    return run_ranks(folder, 2, scenarios.FAST)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    return {name: fsdp_update(folder, name) for name in {scenario.split()[0] for scenario in scenarios.FAST}}


def fsdp_update(folder: Path, model: str) -> dict[str, Any]:
    context = scenarios.Place(0, 1, folder, "cpu").context(model)
    made = FsdpBackend(FsdpOptions(param_dtype="float32", micro_batch_tokens=20), context)
    (batch,) = scenarios.batches(1)
    logprobs, before = made.log_probs(batch), weights(made)
    metrics = dict(made.train_step(batch).values)
    gradients = gradients_of(before, weights(made), scenarios.PROBE)
    made.close()
    return {"logprobs": logprobs, "before": before, "metrics": metrics, "gradients": gradients}


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
