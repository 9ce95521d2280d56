"""Conformance kit for corrections: the weight is 1 where the two policies agree and where nothing is trained, finite
and not negative everywhere, and without gradient.

class TestMine(CorrectionConformance):
    options = {"high": 2.0}
    def make(self) -> Correction: return my_correction
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from miles_core.kinds.correction import Correction

LENGTHS = (4, 2, 6, 3)


def example(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """(log-ratio f[N], mask bool[N], sequence ids i64[N]) with small and large mismatches."""
    generator = torch.Generator().manual_seed(9)
    total = sum(LENGTHS)
    mask = torch.tensor([t != 0 for n in LENGTHS for t in range(n)])
    mask[5] = False  # the second sequence trains nothing
    log_ratio = torch.randn(total, generator=generator, dtype=torch.float64).to(dtype)
    return log_ratio, mask, torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))


class CorrectionConformance:
    """Subclass it and say how to make the correction."""

    options: ClassVar[Mapping[str, Any]] = {}
    """Keyword arguments the correction is called with."""

    def make(self) -> Correction:
        raise NotImplementedError

    def call(self, log_ratio: Tensor, mask: Tensor, sequence_ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.make()(log_ratio, mask, sequence_ids, **self.options)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_one_weight_per_token_in_the_dtype_of_the_ratio(self, dtype: torch.dtype) -> None:
        log_ratio, mask, ids = example(dtype)
        weight, _ = self.call(log_ratio, mask, ids)
        assert weight.shape == mask.shape, f"shape {tuple(weight.shape)}, expected [N] = {tuple(mask.shape)}"
        assert weight.dtype is dtype, f"the log-ratio is {dtype}, the weight {weight.dtype}"

    def test_weights_are_finite_and_not_negative(self) -> None:
        weight, _ = self.call(*example())
        assert weight.isfinite().all(), "a weight is NaN or infinite"
        assert (weight >= 0).all(), "a negative weight turns the gradient around"

    def test_untrained_tokens_have_weight_one(self) -> None:
        log_ratio, mask, ids = example()
        weight, _ = self.call(log_ratio, mask, ids)
        assert (weight[~mask] == 1).all(), "the weight must be 1 outside the mask, since weights of several multiply"

    def test_equal_policies_need_no_correction(self) -> None:
        log_ratio, mask, ids = example()
        weight, _ = self.call(torch.zeros_like(log_ratio), mask, ids)
        assert (weight == 1).all(), "a ratio of 1 must give the weight 1"

    def test_what_untrained_tokens_hold_does_not_matter(self) -> None:
        log_ratio, mask, ids = example()
        clean, clean_metrics = self.call(log_ratio, mask, ids)
        noisy, noisy_metrics = self.call(torch.where(mask, log_ratio, 9.0), mask, ids)
        assert torch.equal(clean, noisy), "the ratio of an untrained token changed a weight"
        for name, values in clean_metrics.items():
            assert torch.equal(values[mask], noisy_metrics[name][mask]), f"it changed the metric {name!r}"

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("size", [30.0, 1000.0])
    def test_extreme_ratios_stay_finite(self, size: float, dtype: torch.dtype) -> None:
        log_ratio, mask, ids = example(dtype)
        weight, metrics = self.call(log_ratio.sign() * size, mask, ids)
        assert weight.isfinite().all(), f"log-ratios of +-{size:g} gave the weights {weight.tolist()}"
        for name, values in metrics.items():
            assert values[mask].isfinite().all(), f"log-ratios of +-{size:g} gave a metric {name!r} that is not finite"

    def test_the_weight_carries_no_gradient(self) -> None:
        log_ratio, mask, ids = example()
        weight, metrics = self.call(log_ratio.requires_grad_(), mask, ids)
        assert not weight.requires_grad, "the weight is a constant of the update; detach the log-ratio"
        assert not any(values.requires_grad for values in metrics.values()), "a metric carries a gradient"

    def test_metrics_are_per_token(self) -> None:
        log_ratio, mask, ids = example()
        for name, values in self.call(log_ratio, mask, ids)[1].items():
            assert values.shape == mask.shape, f"metric {name!r} has shape {tuple(values.shape)}, expected [N]"

    def test_the_order_of_sequences_does_not_matter(self) -> None:
        log_ratio, mask, ids = example()
        order = [2, 0, 3, 1]
        tokens = torch.cat([torch.nonzero(ids == s).squeeze(1) for s in order])
        permuted = torch.repeat_interleave(torch.arange(4), torch.tensor([LENGTHS[s] for s in order]))
        weight, _ = self.call(log_ratio, mask, ids)
        found, _ = self.call(log_ratio[tokens], mask[tokens], permuted)
        assert torch.allclose(found, weight[tokens], atol=1e-9), "reordering the sequences changed their weights"

    def test_the_correction_is_pure(self) -> None:
        log_ratio, mask, ids = example()
        before = log_ratio.clone()
        assert torch.equal(self.call(log_ratio, mask, ids)[0], self.call(log_ratio, mask, ids)[0]), "two calls differ"
        assert torch.equal(log_ratio, before), "the log-ratio was changed in place"
