"""Conformance kit for precisions: the name decides what is quantised, equal inputs give equal bits, and the error is
that of the format.

class TestMine(PrecisionConformance):
    relative_error = 0.07
    skipped = ("lm_head.weight",)
    def make(self, tmp_path): return MyPrecision(MyOptions())
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from miles_core.kinds.precision import Precision
from miles_core.types import NamedTensor


class PrecisionConformance:
    """Subclass it and say how to make the precision."""

    relative_error: float = 0.1
    """Largest error of an element, as a fraction of the tensor's largest magnitude."""
    quantized: tuple[str, ...] = ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate_up_proj.weight")
    """Names that must be quantised; the second looks like a router's `mlp.gate` to whoever compares by substring."""
    skipped: tuple[str, ...] = ("model.norm.weight",)
    """Names that must keep their dtype."""
    shape: tuple[int, int] = (32, 64)
    """Of the tensors tried; a multiple of the format's blocks."""

    def make(self, tmp_path: Path) -> Precision:
        raise NotImplementedError

    def _tensor(self, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

    def test_names_decide_what_is_quantised(self, tmp_path: Path) -> None:
        precision = self.make(tmp_path)
        assert [name for name in self.quantized if precision.skips(name)] == [], "skipped although it must not be"
        assert [name for name in self.skipped if not precision.skips(name)] == [], "not skipped although it must be"

    def test_a_skipped_tensor_is_sent_as_it_is(self, tmp_path: Path) -> None:
        precision = self.make(tmp_path)
        for name in self.skipped:
            tensor = self._tensor()
            sent = precision.quantize(NamedTensor(name=name, tensor=tensor))
            assert [each.name for each in sent] == [name]
            assert _equal(sent[0].tensor, tensor), f"{name} changed on the way"

    def test_quantising_is_deterministic(self, tmp_path: Path) -> None:
        for name in self.quantized:
            first = self.make(tmp_path).quantize(NamedTensor(name=name, tensor=self._tensor()))
            precision = self.make(tmp_path)
            precision.quantize(NamedTensor(name=name, tensor=self._tensor(1)))
            second = precision.quantize(NamedTensor(name=name, tensor=self._tensor()))
            assert _same(first, second), f"{name}: the same tensor was quantised in two ways"

    def test_names_sent_are_distinct(self, tmp_path: Path) -> None:
        precision = self.make(tmp_path)
        names = [
            sent.name
            for name in (*self.quantized, *self.skipped)
            for sent in precision.quantize(NamedTensor(name=name, tensor=self._tensor()))
        ]
        assert len(names) == len(set(names)), f"two tensors share a name in {names}"

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_the_way_back_is_within_the_formats_error(self, tmp_path: Path, dtype: torch.dtype) -> None:
        precision = self.make(tmp_path)
        for name in self.quantized:
            tensor = self._tensor(dtype=dtype)
            back = precision.dequantize(precision.quantize(NamedTensor(name=name, tensor=tensor)))
            assert back.name == name, f"came back as {back.name}"
            assert back.tensor.shape == tensor.shape, f"{name} came back with shape {tuple(back.tensor.shape)}"
            error = (back.tensor.double() - tensor.double()).abs().max().item()
            allowed = self.relative_error * tensor.double().abs().max().item()
            assert error <= allowed, f"{name}: error {error:.3g}, the format allows {allowed:.3g}"

    def test_rows_of_very_different_size_keep_their_own_scale_or_the_formats_error(self, tmp_path: Path) -> None:
        precision = self.make(tmp_path)
        tensor = self._tensor(dtype=torch.float32) * torch.logspace(-3, 3, self.shape[0]).unsqueeze(1)
        back = precision.dequantize(precision.quantize(NamedTensor(name=self.quantized[0], tensor=tensor)))
        assert torch.isfinite(back.tensor.float()).all(), "large values overflowed"
        error = (back.tensor.double() - tensor.double()).abs().max().item()
        assert error <= self.relative_error * tensor.double().abs().max().item(), f"error {error:.3g}"

    def test_an_all_zero_tensor_stays_zero(self, tmp_path: Path) -> None:
        precision = self.make(tmp_path)
        zeros = torch.zeros(self.shape)
        back = precision.dequantize(precision.quantize(NamedTensor(name=self.quantized[0], tensor=zeros)))
        assert _equal(back.tensor.float(), zeros), "zeros came back as something else (a scale of zero?)"

    def test_the_input_is_left_alone(self, tmp_path: Path) -> None:
        precision = self.make(tmp_path)
        tensor = self._tensor(dtype=torch.float32)
        precision.quantize(NamedTensor(name=self.quantized[0], tensor=tensor))
        assert _equal(tensor, self._tensor(dtype=torch.float32)), "`quantize` changed the trainer's weights"

    def test_the_memory_layout_does_not_matter(self, tmp_path: Path) -> None:
        precision = self.make(tmp_path)
        tensor = self._tensor()
        strided = tensor.t().contiguous().t()
        one = precision.quantize(NamedTensor(name=self.quantized[0], tensor=tensor))
        other = precision.quantize(NamedTensor(name=self.quantized[0], tensor=strided))
        assert _same(one, other), "a transposed view was quantised differently"


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.double(), other.double())


def _same(one: Sequence[NamedTensor], other: Sequence[NamedTensor]) -> bool:
    return [each.name for each in one] == [each.name for each in other] and all(
        _equal(a.tensor, b.tensor) for a, b in zip(one, other, strict=True)
    )
