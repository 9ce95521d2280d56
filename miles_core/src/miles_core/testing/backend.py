"""Conformance kit for backends: log-probs and gradient are those of one big batch; checkpoints and exports are exact.

    class TestMine(BackendConformance):
        def make(self, context: BackendContext, *, micro_batch_tokens: int) -> Backend:
            return MyBackend(MyOptions(micro_batch_tokens=micro_batch_tokens), context)

The kit sees a backend from outside. It takes the gradient from one AdamW step with a large epsilon, whose change of a
weight is ``-lr g / (|g| + eps)``, and compares it with float64 autograd over one sequence at a time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from miles_core.errors import CheckpointError, MilesError, RunError
from miles_core.kinds.backend import Backend, BackendContext, LossSettings, OptimizerSettings
from miles_core.testing.backend_oracle import POISON, PROBE, SURROGATE, example_batch, expected_update
from miles_core.testing.tiny import make_tiny_model
from miles_core.types import TrainBatch
from miles_core.weights.buckets import fused_group

LENGTHS = (7, 2, 19, 12, 5, 3)
ONE, FEW, ALL = 1, 20, 4096
"""Token budgets: a sequence each, some together, everything in one micro-batch."""


class BackendConformance:
    """Subclass it and say how to make one rank of the backend."""

    dtype: ClassVar[Literal["float32", "float64"]] = "float32"
    """Dtype of the checkpoint the kit writes; the backend must compute in it."""
    device: ClassVar[str] = "cpu"
    """Where the backend computes; the oracle stays on the CPU."""
    tags: ClassVar[frozenset[str]] = frozenset()
    """What the capability provides."""

    def make(self, context: BackendContext, *, micro_batch_tokens: int) -> Backend:
        """The backend, computing in `dtype`, with at most `micro_batch_tokens` tokens in a micro-batch."""
        raise NotImplementedError

    # --- fixtures -----------------------------------------------------------------------------------------------------

    @pytest.fixture(scope="class")
    @classmethod
    def model_path(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        # Dropout is in the config, as in checkpoints that were trained with it: it must act nowhere.
        overrides = {"attention_dropout": 0.5}
        return make_tiny_model(tmp_path_factory.mktemp("model"), dtype=cls.dtype, context=64, overrides=overrides)

    @pytest.fixture
    def batch(self) -> TrainBatch:
        return example_batch(np.random.default_rng(7), LENGTHS)

    @property
    def rtol(self) -> float:
        """Relative to the largest value compared."""
        return 1e-6 if self.dtype == "float64" else 1e-4

    def context(self, model_path: Path, **changes: Any) -> BackendContext:
        context = BackendContext(
            model_path=str(model_path),
            device=self.device,
            rank=0,
            world_size=1,
            seed=0,
            optimizer=_optimizer(),
            loss=_loss(),
            reference=False,
        )
        return replace(context, **changes)

    # --- log-probs ----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("budget", [ONE, FEW, ALL])
    def test_log_probs_are_those_of_each_sequence_alone(self, model_path: Path, batch: TrainBatch, budget: int) -> None:
        backend = self.make(self.context(model_path), micro_batch_tokens=budget)
        found = backend.log_probs(batch)
        backend.close()
        expected = expected_update(model_path, batch, _loss()).logprobs
        assert found.shape == (batch.num_tokens,)
        assert found.dtype == np.float32
        wrong = np.flatnonzero(np.abs(found - expected) > 1e-4)
        assert wrong.size == 0, f"log-probs differ at tokens {wrong[:5]} (sequences start at {batch.offsets[:-1]})"

    def test_log_probs_are_zero_outside_the_mask_and_at_first_tokens(self, model_path: Path, batch: TrainBatch) -> None:
        backend = self.make(self.context(model_path), micro_batch_tokens=ALL)
        masked = backend.log_probs(batch)
        every = backend.log_probs(replace(batch, loss_mask=np.ones_like(batch.loss_mask)))
        backend.close()
        assert not masked[~batch.loss_mask].any(), "log-probs outside the mask"
        first = batch.offsets[:-1]
        assert not every[first].any(), "a sequence's first token has no prefix, yet has a log-prob"
        assert (np.delete(every, first) < 0).all()

    def test_log_probs_are_the_same_when_asked_twice(self, model_path: Path, batch: TrainBatch) -> None:
        backend = self.make(self.context(model_path), micro_batch_tokens=FEW)
        first, second = backend.log_probs(batch), backend.log_probs(batch)
        backend.close()
        assert np.array_equal(first, second), "log-probs differ between two calls: is dropout on?"

    # --- the update ---------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("budget", [ONE, FEW, ALL])
    def test_gradient_is_that_of_one_batch_in_float64(self, model_path: Path, batch: TrainBatch, budget: int) -> None:
        loss = _loss(entropy_coef=0.05, kl_coef=0.3, options={"power": 0.5})
        backend = self.make(self.context(model_path, loss=loss), micro_batch_tokens=budget)
        before = weights(backend)
        metrics = backend.train_step(batch).values
        found = gradients_of(before, weights(backend), _optimizer())
        backend.close()
        expected = expected_update(model_path, batch, loss)
        largest = max(float(g.abs().max()) for g in expected.gradients.values())
        for name, gradient in expected.gradients.items():
            worst = float((found[name].double() - gradient).abs().max()) / largest
            assert worst < self.rtol, f"gradient of {name} is off by {worst:.1e} with {budget} tokens a micro-batch"
        for name in ("loss", "entropy", "kl", "grad_norm"):
            assert metrics[name] == pytest.approx(getattr(expected, name), rel=1e-4), name

    def test_metrics_of_the_loss_are_means_over_trained_tokens(self, model_path: Path, batch: TrainBatch) -> None:
        results = []
        for budget in (ONE, ALL):
            backend = self.make(self.context(model_path), micro_batch_tokens=budget)
            results.append(backend.train_step(batch).values)
            backend.close()
        old = batch.old_logprobs
        assert old is not None
        ratio = np.exp(expected_update(model_path, batch, _loss()).logprobs - old)[batch.loss_mask].mean()
        assert {"loss", "grad_norm", "lr", "entropy", "ratio"} <= set(results[0])
        for values in results:
            assert values["ratio"] == pytest.approx(float(ratio), rel=1e-4)

    def test_clipping_uses_the_global_norm_and_the_schedule_the_step(self, model_path: Path, batch: TrainBatch) -> None:
        optimizer = _optimizer(clip_grad_norm=1e-3, schedule="linear", warmup_steps=2, total_steps=4, lr=0.5)
        backend = self.make(self.context(model_path, optimizer=optimizer), micro_batch_tokens=FEW)
        before = weights(backend)
        steps = [backend.train_step(batch).values]
        found = gradients_of(before, weights(backend), replace(optimizer, lr=0.25))
        steps += [backend.train_step(batch).values for _ in range(3)]
        backend.close()
        norm = torch.stack([g.double().square().sum() for g in found.values()]).sum().sqrt()
        assert float(norm) == pytest.approx(1e-3, rel=1e-2), "the gradient was not clipped to the global norm"
        assert steps[0]["grad_norm"] > 1e-2, "grad_norm is the norm before clipping"
        assert [step["lr"] for step in steps] == pytest.approx([0.25, 0.5, 0.5, 0.25])

    def test_weight_decay_leaves_norms_alone(self, model_path: Path, batch: TrainBatch) -> None:
        after = []
        for decay in (0.0, 0.5):
            optimizer = _optimizer(weight_decay=decay, lr=0.1)
            backend = self.make(self.context(model_path, optimizer=optimizer), micro_batch_tokens=ALL)
            backend.train_step(batch)
            after.append(weights(backend))
            backend.close()
        for name, plain in after[0].items():
            assert torch.equal(plain, after[1][name]) == (plain.dim() < 2), name

    @pytest.mark.parametrize("what", ["loss", "gradient"])
    def test_a_nonfinite_step_changes_nothing(self, model_path: Path, batch: TrainBatch, what: str) -> None:
        bad = _poisoned(batch, what)
        skipping = self.make(self.context(model_path, loss=_loss(on_nonfinite="skip")), micro_batch_tokens=FEW)
        before = weights(skipping)
        result = skipping.train_step(bad)
        assert result.skipped, "a step with NaN was taken"
        assert all(np.isfinite(value) for value in result.values.values())
        assert _equal(before, weights(skipping)), "a skipped step changed the weights"
        assert skipping.train_step(batch).skipped is None, "one bad batch poisons the next step"
        skipping.close()

        stopping = self.make(self.context(model_path), micro_batch_tokens=FEW)
        with pytest.raises(RunError) as raised:
            stopping.train_step(bad)
        _has_four_parts(raised.value)
        assert _equal(before, weights(stopping)), "a stopped step changed the weights"
        stopping.close()

    # --- export -------------------------------------------------------------------------------------------------------

    def test_export_is_the_checkpoint_tensor_for_tensor(self, model_path: Path) -> None:
        from safetensors.torch import load_file

        backend = self.make(self.context(model_path), micro_batch_tokens=ALL)
        buckets = list(backend.export(3))
        backend.close()
        found = {t.name: t.tensor for bucket in buckets for t in bucket.tensors}
        expected = load_file(model_path / "model.safetensors")
        assert sum(len(bucket.tensors) for bucket in buckets) == len(found), "a tensor was exported twice"
        assert not (expected.keys() - found.keys()), f"not exported: {sorted(expected.keys() - found.keys())}"
        assert not (found.keys() - expected.keys()), f"unknown: {sorted(found.keys() - expected.keys())}"
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype, name
            assert torch.equal(found[name].cpu(), tensor), name
        assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
        assert [bucket.last for bucket in buckets] == [False] * (len(buckets) - 1) + [True]
        assert {bucket.version for bucket in buckets} == {3}
        homes: dict[str, set[int]] = {}
        for bucket in buckets:
            for named in bucket.tensors:
                homes.setdefault(fused_group(named.name), set()).add(bucket.index)
        split = sorted(group for group, indices in homes.items() if len(indices) > 1)
        assert not split, f"fused groups split over buckets: {split}"

    def test_exported_tensors_do_not_follow_later_updates(self, model_path: Path, batch: TrainBatch) -> None:
        backend = self.make(self.context(model_path), micro_batch_tokens=ALL)
        tensors = {t.name: t.tensor for bucket in backend.export(0) for t in bucket.tensors}
        before = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
        backend.train_step(batch)
        after = weights(backend)
        backend.close()
        tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
        assert _equal(before, tensors), "an exported tensor is the live one"
        unchanged = sorted(name for name in before if torch.equal(before[name], after[name]))
        assert not unchanged, f"a step does not reach the export of: {unchanged}"

    def test_save_hf_writes_a_folder_with_equal_weights_and_tokenizer(
        self, model_path: Path, batch: TrainBatch, tmp_path: Path
    ) -> None:
        from safetensors.torch import load_file
        from transformers import AutoTokenizer

        backend = self.make(self.context(model_path), micro_batch_tokens=ALL)
        backend.train_step(batch)
        backend.save_hf(tmp_path / "hf")
        current = weights(backend)
        backend.close()
        names = load_file(model_path / "model.safetensors").keys()
        saved = load_file(tmp_path / "hf" / "model.safetensors")
        assert not (names - saved.keys()), f"not saved: {sorted(names - saved.keys())}"
        assert _equal(saved, current), "the folder holds other weights than the export"
        expected_update(tmp_path / "hf", batch, _loss())  # transformers loads it
        chat = [{"role": "user", "content": "1 + 1"}]
        texts = [
            AutoTokenizer.from_pretrained(path).apply_chat_template(chat, tokenize=False)
            for path in (model_path, tmp_path / "hf")
        ]
        assert texts[0] == texts[1]

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def test_load_continues_bit_for_bit(self, model_path: Path, tmp_path: Path) -> None:
        rng = np.random.default_rng(3)
        batches = [example_batch(rng, LENGTHS) for _ in range(4)]
        optimizer = _optimizer(lr=0.05, eps=1e-8, schedule="cosine", warmup_steps=1, total_steps=6, weight_decay=0.1)
        context = self.context(model_path, optimizer=optimizer)
        straight = self.make(context, micro_batch_tokens=FEW)
        for batch in batches[:2]:
            straight.train_step(batch)
        straight.save(tmp_path / "state")
        expected = [straight.train_step(batch).values for batch in batches[2:]]
        final = weights(straight)
        straight.close()

        resumed = self.make(context, micro_batch_tokens=FEW)
        resumed.load(tmp_path / "state")
        found = [resumed.train_step(batch).values for batch in batches[2:]]
        assert found == expected, "steps differ after a resume"
        assert _equal(final, weights(resumed)), "weights differ after a resume"
        resumed.close()

    def test_a_half_written_checkpoint_is_refused(self, model_path: Path, batch: TrainBatch, tmp_path: Path) -> None:
        backend = self.make(self.context(model_path), micro_batch_tokens=ALL)
        whole = tmp_path / "state"
        backend.save(whole)
        backend.train_step(batch)
        before = weights(backend)
        files = sorted(path for path in whole.rglob("*") if path.is_file())
        for path in files:
            content = path.read_bytes()
            for damage in (None, content[: len(content) // 2]):
                path.unlink()
                if damage is not None:
                    path.write_bytes(damage)
                with pytest.raises(CheckpointError) as raised:
                    backend.load(whole)
                _has_four_parts(raised.value)
                path.write_bytes(content)
        assert _equal(before, weights(backend)), "a refused checkpoint changed the weights"
        with pytest.raises(CheckpointError):
            backend.load(tmp_path / "absent")
        backend.load(whole)
        backend.close()

    # --- life and errors ----------------------------------------------------------------------------------------------

    def test_offload_and_onload_lose_nothing(self, model_path: Path, batch: TrainBatch) -> None:
        results = []
        for cycle in (False, True):
            backend = self.make(self.context(model_path), micro_batch_tokens=FEW)
            backend.train_step(batch)
            if cycle:
                for call in (backend.offload, backend.offload, backend.onload, backend.onload):
                    call()
            backend.train_step(batch)
            results.append(weights(backend))
            backend.close()
        assert _equal(*results)

    def test_reference_stays_the_initial_policy(self, model_path: Path, batch: TrainBatch) -> None:
        if "reference-model" not in self.tags:
            pytest.skip("does not declare reference-model")
        backend = self.make(self.context(model_path, reference=True), micro_batch_tokens=FEW)
        initial = backend.log_probs(batch)
        reference = backend.log_probs(batch, model="reference")
        assert np.array_equal(reference, initial), "the reference differs from the initial policy"
        backend.train_step(batch)
        assert np.array_equal(backend.log_probs(batch, model="reference"), initial), "the reference moved"
        assert not np.allclose(backend.log_probs(batch), initial)
        backend.close()

    def test_asking_for_an_absent_reference_is_an_error(self, model_path: Path, batch: TrainBatch) -> None:
        backend = self.make(self.context(model_path), micro_batch_tokens=FEW)
        with pytest.raises(MilesError):
            backend.log_probs(batch, model="reference")
        backend.close()

    def test_a_sequence_over_the_models_limit_is_refused(self, model_path: Path) -> None:
        backend = self.make(self.context(model_path), micro_batch_tokens=ALL)
        too_long = example_batch(np.random.default_rng(0), (65,))
        for call in (backend.log_probs, backend.train_step):
            with pytest.raises(MilesError) as raised:
                call(too_long)
            _has_four_parts(raised.value)
        backend.close()

    def test_a_missing_model_folder_is_a_miles_error(self, tmp_path: Path) -> None:
        with pytest.raises(MilesError) as raised:
            self.make(self.context(tmp_path / "nowhere"), micro_batch_tokens=ALL)
        _has_four_parts(raised.value)


# --- pieces -----------------------------------------------------------------------------------------------------------


def weights(backend: Backend) -> dict[str, Tensor]:
    """Copies of everything the backend exports, by name, on the CPU."""
    return {t.name: t.tensor.cpu().clone() for bucket in backend.export(0) for t in bucket.tensors}


def _optimizer(**changes: Any) -> OptimizerSettings:
    return replace(PROBE, **changes)


def _loss(**changes: Any) -> LossSettings:
    return replace(LossSettings(load=SURROGATE), **changes)


def gradients_of(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], optimizer: OptimizerSettings
) -> dict[str, Tensor]:
    """Invert AdamW's first step: with ``d = (before - after) / lr = g / (|g| + eps)``, ``g = d eps / (1 - |d|)``."""
    moved = {name: (before[name].double() - after[name].double()) / optimizer.lr for name in before}
    return {name: d * optimizer.eps / (1 - d.abs()) for name, d in moved.items()}


def _poisoned(batch: TrainBatch, what: str) -> TrainBatch:
    """A batch whose loss is NaN, or whose loss is finite and gradient NaN."""
    advantages = batch.advantages.copy()
    advantages[np.flatnonzero(batch.loss_mask)[-1]] = np.nan if what == "loss" else 2 * POISON
    return replace(batch, advantages=advantages)


def _equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def _has_four_parts(error: MilesError) -> None:
    missing = [part for part in ("expected", "found", "where", "do") if not getattr(error, part)]
    assert not missing, f"the error lacks {missing}: {error}"
    assert re.match(r"^[a-z`]", error.message), "an error's message starts in lower case"
