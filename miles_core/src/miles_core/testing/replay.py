"""Conformance kit for backends that replay recorded routes (tag `replays-routes`).

class TestMine(ReplayConformance):
    def make(self, context: BackendContext, *, micro_batch_tokens: int) -> Backend:
        return MyBackend(MyOptions(...), context)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_core.errors import MilesError
from miles_core.kinds.backend import Backend, BackendContext, RouteCounts
from miles_core.testing.backend import weights
from miles_core.testing.backend_oracle import LOSS, PROBE, example_batch, expected_update
from miles_core.testing.tiny import make_tiny_model
from miles_core.types import UNRECORDED, RouteMode, TrainBatch

LENGTHS = (7, 2, 19, 12, 5, 3)
LAYERS, TOP_K, EXPERTS = 2, 2, 4


def routed_batch() -> TrainBatch:
    """Random routes that no router would choose; a few positions without a record, and the last ones of sequences."""
    rng = np.random.default_rng(5)
    batch = example_batch(rng, LENGTHS)
    order = np.argsort(rng.random((batch.num_tokens, LAYERS, EXPERTS)), axis=-1)
    routes = order[..., :TOP_K].astype(np.int16)
    routes[batch.offsets[1:] - 1] = UNRECORDED
    routes[[3, 11, 30]] = UNRECORDED
    return replace(batch, routes=routes)


class ReplayConformance:
    """Subclass it and say how to make one rank of the backend; compute in float64 where it can."""

    dtype: Any = "float64"
    rtol = 1e-6
    """Of log-probs, loss, and of the gradient relative to its largest entry."""

    def make(self, context: BackendContext, *, micro_batch_tokens: int) -> Backend:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def model_path(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("replay") / "model"
        make_tiny_model(folder, architecture="qwen3-moe", dtype=cls.dtype, tie=False, context=64)
        return folder

    def backend(self, model_path: Path, mode: RouteMode, *, budget: int = 20, reference: bool = False) -> Backend:
        context = BackendContext(
            model_path=str(model_path),
            device="cpu",
            rank=0,
            world_size=1,
            seed=0,
            optimizer=PROBE,
            loss=LOSS,
            reference=reference,
            routes=mode,
        )
        made = self.make(context, micro_batch_tokens=budget)
        self._opened.append(made)
        return made

    @pytest.fixture(autouse=True)
    def _close_what_was_opened(self) -> Iterator[None]:
        self._opened: list[Backend] = []
        yield
        for backend in self._opened:
            backend.close()

    # --- the numbers --------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("budget", [1, 20, 4096])
    def test_log_probs_are_those_of_the_given_experts(self, model_path: Path, budget: int) -> None:
        batch = routed_batch()
        found = self.backend(model_path, "replay", budget=budget).log_probs(batch)
        expected = expected_update(model_path, batch, LOSS, given_experts=True).logprobs
        plain = expected_update(model_path, batch, LOSS).logprobs
        assert np.abs(found - expected).max() < self.rtol * np.abs(expected).max()
        assert np.abs(expected - plain).max() > 0.01, "the given experts make no difference, so this test shows nothing"

    @pytest.mark.parametrize("budget", [1, 20, 4096])
    def test_gradient_is_that_of_the_given_experts(self, model_path: Path, budget: int) -> None:
        batch = routed_batch()
        backend = self.backend(model_path, "replay", budget=budget)
        before = weights(backend)
        metrics = backend.train_step(batch).values
        after = weights(backend)
        expected = expected_update(model_path, batch, LOSS, given_experts=True)
        assert metrics["loss"] == pytest.approx(expected.loss, rel=self.rtol)
        assert metrics["grad_norm"] == pytest.approx(expected.grad_norm, rel=self.rtol)
        largest = max(float(gradient.abs().max()) for gradient in expected.gradients.values())
        routers = [name for name in expected.gradients if name.endswith("mlp.gate.weight")]
        assert len(routers) == LAYERS
        for name in routers:  # through the gates
            moved = before[name].double() - after[name].double()
            gradient = moved / (1 - moved.abs())
            assert float(expected.gradients[name].abs().max()) > 0
            assert float((gradient - expected.gradients[name]).abs().max()) < 10 * self.rtol * largest, name

    def test_recording_alone_leaves_the_forward_pass_alone(self, model_path: Path) -> None:
        batch = routed_batch()
        found = self.backend(model_path, "record").log_probs(batch)
        assert np.array_equal(found, self.backend(model_path, "off").log_probs(replace(batch, routes=None)))

    def test_the_reference_takes_its_own_experts(self, model_path: Path) -> None:
        batch = routed_batch()
        backend = self.backend(model_path, "replay", reference=True)
        backend.log_probs(batch)
        found = backend.log_probs(batch, model="reference")
        plain = self.backend(model_path, "off").log_probs(batch)
        assert np.allclose(found, plain, rtol=self.rtol)

    # --- the counts ---------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("budget", [1, 4096])
    def test_counts_tell_recorded_from_unrecorded_and_equal_from_different(self, model_path: Path, budget: int) -> None:
        batch = routed_batch()
        recording, replaying = (self.backend(model_path, mode, budget=budget) for mode in ("record", "replay"))
        assert recording.route_counts() is None
        recording.log_probs(batch)
        replaying.log_probs(batch)
        inputs = batch.num_tokens - batch.num_sequences
        counts = recording.route_counts()
        assert isinstance(counts, RouteCounts)
        assert (counts.recorded, counts.unrecorded) == ((inputs - 3) * LAYERS, 3 * LAYERS)
        assert counts.own_differs == counts.used_differs
        assert counts.own_differs > counts.recorded // 2, "random routes agree with the router too often"
        forced = replaying.route_counts()
        assert forced is not None
        assert forced.used_differs == 0
        assert forced.own_differs > forced.recorded // 2

    def test_counts_are_of_the_latest_scoring_pass_alone(self, model_path: Path) -> None:
        batch = routed_batch()
        backend = self.backend(model_path, "record")
        backend.log_probs(batch)
        first = backend.route_counts()
        backend.train_step(batch)
        assert backend.route_counts() == first
        backend.log_probs(batch.select([1]))
        second = backend.route_counts()
        assert second is not None
        assert (second.recorded, second.unrecorded) == (1 * LAYERS, 0)

    def test_routes_off_counts_nothing(self, model_path: Path) -> None:
        backend = self.backend(model_path, "off")
        backend.log_probs(routed_batch())
        assert backend.route_counts() is None

    # --- refusals -----------------------------------------------------------------------------------------------------

    def test_a_dense_model_is_refused(self, tmp_path: Path) -> None:
        make_tiny_model(tmp_path / "dense", dtype=self.dtype)
        with pytest.raises(MilesError, match="dense"):
            self.backend(tmp_path / "dense", "replay")

    @pytest.mark.parametrize("what", ["layers", "experts", "index"])
    def test_routes_of_another_model_are_refused(self, model_path: Path, what: str) -> None:
        batch = routed_batch()
        assert batch.routes is not None
        wrong = {
            "layers": batch.routes[:, :1],
            "experts": batch.routes[:, :, :1],
            "index": np.where(batch.routes == 0, np.int16(EXPERTS), batch.routes),
        }[what]
        with pytest.raises(MilesError, match="routes"):
            self.backend(model_path, "replay").log_probs(replace(batch, routes=wrong))
