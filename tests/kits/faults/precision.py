"""Precisions that are wrong in one way each. The sound one is int8 with a scale for each row."""

import torch

from miles_core.testing.precision import PrecisionConformance
from miles_core.types import NamedTensor


class Sound:
    def skips(self, name):
        return name.endswith("norm.weight")

    def scale(self, tensor):
        return tensor.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127

    def scale_name(self, name):
        return f"{name}_scale"

    def quantize(self, named):
        if self.skips(named.name):
            return [named]
        wide = named.tensor.float()
        scale = self.scale(wide)
        codes = (wide / scale).round().to(torch.int8)
        return [NamedTensor(name=named.name, tensor=codes), NamedTensor(name=self.scale_name(named.name), tensor=scale)]

    def dequantize(self, tensors):
        codes, scale = tensors
        return NamedTensor(name=codes.name, tensor=codes.tensor.float() * scale.tensor)


class Faulty(PrecisionConformance):
    relative_error = 0.02

    def make(self, tmp_path):
        return self.precision()


class TestSkipsBySubstring(Faulty):
    class precision(Sound):
        def skips(self, name):
            return "norm" in name or "mlp.gate" in name

        def dequantize(self, tensors):
            return tensors[0] if len(tensors) == 1 else super().dequantize(tensors)

    caught_by = {"test_names_decide_what_is_quantised": "skipped although it must not be"}


class TestDividesByAScaleOfZero(Faulty):
    class precision(Sound):
        def scale(self, tensor):
            return tensor.abs().amax(dim=1, keepdim=True) / 127

        def dequantize(self, tensors):
            codes, scale = tensors
            return NamedTensor(
                name=codes.name, tensor=codes.tensor.float() * scale.tensor / (scale.tensor / scale.tensor)
            )

    caught_by = {"test_an_all_zero_tensor_stays_zero": "a scale of zero"}


class TestUsesFourBits(Faulty):
    class precision(Sound):
        def scale(self, tensor):
            return super().scale(tensor) * 16

    caught_by = {
        "test_the_way_back_is_within_the_formats_error": "the format allows",
        "test_rows_of_very_different_size_keep_their_own_scale_or_the_formats_error": "error",
    }


class TestAssumesARange(Faulty):
    class precision(Sound):
        def scale(self, tensor):
            return torch.full((tensor.shape[0], 1), 4.5 / 127)

    caught_by = {"test_rows_of_very_different_size_keep_their_own_scale_or_the_formats_error": "error"}


class TestKeepsARunningScale(Faulty):
    class precision(Sound):
        def scale(self, tensor):
            self.seen = torch.maximum(getattr(self, "seen", torch.zeros(1)), super().scale(tensor))
            return self.seen

    caught_by = {"test_quantising_is_deterministic": "quantised in two ways"}


class TestNamesEveryScaleAlike(Faulty):
    class precision(Sound):
        def scale_name(self, name):
            return name.rsplit(".", 2)[0] + ".weight_scale"

        def quantize(self, named):
            sent = super().quantize(named)
            return [*sent[:1], *[NamedTensor(name="weight_scale", tensor=each.tensor) for each in sent[1:]]]

    caught_by = {"test_names_sent_are_distinct": "share a name"}


class TestQuantisesInPlace(Faulty):
    class precision(Sound):
        def quantize(self, named):
            sent = super().quantize(named)
            if not self.skips(named.name):
                named.tensor.copy_(self.dequantize(sent).tensor)
            return sent

    caught_by = {"test_the_input_is_left_alone": "changed the trainer's weights"}


class TestReadsStorageInsteadOfTheTensor(Faulty):
    class precision(Sound):
        def quantize(self, named):
            flat = torch.as_strided(named.tensor, named.tensor.shape, (named.tensor.shape[1], 1))
            return super().quantize(NamedTensor(name=named.name, tensor=flat))

    caught_by = {"test_the_memory_layout_does_not_matter": "a transposed view"}


class TestConvertsSkippedTensors(Faulty):
    class precision(Sound):
        def quantize(self, named):
            if self.skips(named.name):
                return [NamedTensor(name=named.name, tensor=named.tensor.float())]
            return super().quantize(named)

    caught_by = {"test_a_skipped_tensor_is_sent_as_it_is": "changed on the way"}


class TestForgetsTheName(Faulty):
    class precision(Sound):
        def dequantize(self, tensors):
            return NamedTensor(name="weight", tensor=super().dequantize(tensors).tensor)

    caught_by = {"test_the_way_back_is_within_the_formats_error": "came back as weight"}
