"""Conformance kit for architectures: log-probs are those of transformers, and every tensor comes back bit for bit, on
one rank and in every layout of two.

class TestMine(ArchitectureConformance):
    load = "acme.architecture:ACME"
    @classmethod
    def make_model(cls, folder): AcmeForCausalLM(tiny_config).save_pretrained(folder)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from miles_core.testing.backend import weights
from miles_core.testing.backend_oracle import LOSS, expected_update
from miles_core.testing.pair import Options, Outcome, Pair, Task, changed, make_backend, scored_batch
from miles_core.types import Float32

Layouts = Mapping[str, Options]
DENSE: Layouts = {
    "tensor": {"tensor_parallel": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_parallel": 2, "virtual_pipeline": 2},
}
SPARSE: Layouts = {
    **DENSE,
    "expert": {"expert_parallel": 2},
    "expert tensor": {"tensor_parallel": 2, "sequence_parallel": True, "expert_tensor_parallel": 2},
}


class ArchitectureConformance:
    """Subclass it, name the table in `load`, and write a model in `make_model`. Needs miles-megatron."""

    load: ClassVar[str]
    """``module:attribute`` of the table."""
    layouts: ClassVar[Layouts] = DENSE
    """Options of backend `megatron` for two ranks; `SPARSE` for a mixture of experts."""
    tolerance: ClassVar[float] = 1e-4
    """Of a log-prob, against transformers in float64."""

    @classmethod
    def make_model(cls, folder: Path) -> None:
        """Write config.json and model.safetensors of a random model in float32.

        Four layers, an even number of key-value heads, 270 tokens or more, and no weight left at 0 or 1: a tensor that
        changes places with its neighbour must show.
        """
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def model_path(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("model")
        cls.make_model(folder)
        return folder

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls, model_path: Path) -> Float32:
        """Log-probs of `scored_batch`, by transformers in float64."""
        return np.asarray(expected_update(model_path, scored_batch(), LOSS).logprobs, dtype=np.float32)

    @pytest.fixture(scope="class")
    @classmethod
    def two_ranks(cls, model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Outcome]]:
        """What each rank found, by layout."""
        tasks = [Task(load=cls.load, model=model_path, options=options) for options in cls.layouts.values()]
        with Pair(tmp_path_factory.mktemp("ranks")) as pair:
            return [dict(zip(cls.layouts, outcomes, strict=True)) for outcomes in pair.hold(tasks)]

    def test_log_probs_are_those_of_transformers(self, model_path: Path, expected: Float32) -> None:
        backend = make_backend(self.load, model_path)
        found = backend.log_probs(scored_batch())
        backend.close()
        worst = float(np.abs(found - expected).max())
        assert worst < self.tolerance, f"log-probs differ from those of transformers by {worst:.1e}"

    def test_every_tensor_comes_back_bit_for_bit(self, model_path: Path) -> None:
        backend = make_backend(self.load, model_path)
        found = weights(backend)
        backend.close()
        assert not changed(self.load, model_path, found), "a tensor was lost or changed"

    def test_every_tensor_comes_back_from_two_ranks(self, two_ranks: list[dict[str, Outcome]]) -> None:
        for rank, outcomes in enumerate(two_ranks):
            found = {name: outcome.changed for name, outcome in outcomes.items()}
            assert found == {name: [] for name in self.layouts}, f"rank {rank}: a tensor was lost or changed: {found}"

    def test_log_probs_of_two_ranks_are_the_same(self, two_ranks: list[dict[str, Outcome]], expected: Float32) -> None:
        """Shards that come back whole may still have been the wrong ones to compute with."""
        for rank, outcomes in enumerate(two_ranks):
            worst = {name: float(np.abs(outcome.logprobs - expected).max()) for name, outcome in outcomes.items()}
            wrong = {name: f"{by:.1e}" for name, by in worst.items() if not by < self.tolerance}
            assert not wrong, f"rank {rank}: log-probs differ from those of transformers by {wrong}"
