"""Backends that are wrong in one way each. All but the fault is the fsdp backend."""

from dataclasses import replace

import numpy as np
import torch

from miles_core.testing.backend import BackendConformance
from miles_core.types import NamedTensor
from miles_fsdp.backend import FsdpBackend
from miles_fsdp.options import FsdpOptions


class Faulty(BackendConformance):
    tags = frozenset({"reference-model"})

    def make(self, context, *, micro_batch_tokens):
        options = FsdpOptions(param_dtype="float32", micro_batch_tokens=micro_batch_tokens, bucket_mib=1)
        return self.backend(options, context)


class TestAveragesMicroBatches(Faulty):
    class backend(FsdpBackend):
        def train_step(self, batch):
            count = len(self._plan(batch))
            return super().train_step(replace(batch, token_weights=batch.token_weights / count))

    caught_by = {
        "test_gradient_is_that_of_one_batch_in_float64": "with 1 tokens a micro-batch",
    }


class TestShiftsAtBoundaries(Faulty):
    """A sequence's second token is scored from the last token of its neighbour."""

    class backend(FsdpBackend):
        def log_probs(self, batch, *, model="policy"):
            found = super().log_probs(batch, model=model)
            second = batch.offsets[1:-1] + 1
            moved = found.copy()
            moved[second] = np.where(batch.loss_mask[second], found[second] - 0.5, 0.0)
            return moved

    caught_by = {"test_log_probs_are_those_of_each_sequence_alone": "log-probs differ at tokens"}


class TestScoresWithDropout(Faulty):
    class backend(FsdpBackend):
        def log_probs(self, batch, *, model="policy"):
            found = super().log_probs(batch, model=model)
            noise = torch.randn(found.shape).abs().numpy() * 0.1
            return np.where(found != 0, found - noise, 0).astype(np.float32)

    caught_by = {
        "test_log_probs_are_those_of_each_sequence_alone": "log-probs differ at tokens",
        "test_log_probs_are_the_same_when_asked_twice": "is dropout on?",
        "test_reference_stays_the_initial_policy": "the reference differs from the initial policy",
    }


class TestExportDropsATensor(Faulty):
    class backend(FsdpBackend):
        def export(self, version):
            for bucket in super().export(version):
                yield replace(bucket, tensors=tuple(t for t in bucket.tensors if t.name != "model.norm.weight"))

    caught_by = {
        "test_export_is_the_checkpoint_tensor_for_tensor": "not exported: ['model.norm.weight']",
        "test_gradient_is_that_of_one_batch_in_float64": "model.norm.weight",
        "test_save_hf_writes_a_folder_with_equal_weights_and_tokenizer": "the export is incomplete",
    }


class TestExportsLiveTensors(Faulty):
    class backend(FsdpBackend):
        def export(self, version):
            for bucket in super().export(version):
                live = tuple(
                    NamedTensor(name=t.name, tensor=self._weights.masters[t.name].detach()) for t in bucket.tensors
                )
                yield replace(bucket, tensors=live)

    caught_by = {
        "test_exported_tensors_do_not_follow_later_updates": "an exported tensor is the live one",
    }


class TestLoadForgetsTheOptimizer(Faulty):
    class backend(FsdpBackend):
        def load(self, directory):
            super().load(directory)
            for tensor in self._optimizer.moments().values():
                tensor.zero_()

    caught_by = {"test_load_continues_bit_for_bit": "steps differ after a resume"}


class TestTrainsOnNan(Faulty):
    class backend(FsdpBackend):
        def train_step(self, batch):
            found = super().train_step(batch)
            if found.skipped:
                for master in self._weights.masters.values():
                    master.grad = torch.full_like(master, 0.5)
                self._optimizer.step()
            return found

    caught_by = {"test_a_nonfinite_step_changes_nothing": "a skipped step changed the weights"}


class TestReferenceIsThePolicy(Faulty):
    class backend(FsdpBackend):
        def log_probs(self, batch, *, model="policy"):
            if model == "reference" and self._reference is not None:
                model = "policy"
            return super().log_probs(batch, model=model)

    caught_by = {"test_reference_stays_the_initial_policy": "the reference moved"}
