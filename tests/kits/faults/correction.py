"""Wrong corrections, each with one fault. The kit must catch every one."""

from __future__ import annotations

import torch
from torch import Tensor

from miles_core.algorithms.corrections import Result, importance, tis
from miles_core.testing.correction import CorrectionConformance


def zero_outside_the_mask(log_ratio: Tensor, mask: Tensor, sequence_ids: Tensor, /) -> Result:
    weight, metrics = tis(log_ratio, mask, sequence_ids)
    return torch.where(mask, weight, 0.0), metrics


def unbounded(log_ratio: Tensor, mask: Tensor, sequence_ids: Tensor, /) -> Result:
    return torch.where(mask, log_ratio.detach().exp(), 1.0), {}


def log_ratio_as_weight(log_ratio: Tensor, mask: Tensor, sequence_ids: Tensor, /) -> Result:
    """Forgets the exponential."""
    return torch.where(mask, log_ratio.detach().clamp(-2, 2), 1.0), {}


def carries_gradient(log_ratio: Tensor, mask: Tensor, sequence_ids: Tensor, /) -> Result:
    return torch.where(mask, log_ratio.clamp(-20, 0.5).exp(), 1.0), {}


def product_over_prompts(log_ratio: Tensor, mask: Tensor, sequence_ids: Tensor, /) -> Result:
    """A sequence product that takes in the prompt's tokens."""
    weight, _ = importance(log_ratio, torch.ones_like(mask), sequence_ids, level="sequence")
    return torch.where(mask, weight, 1.0), {}


def sequences_by_position(log_ratio: Tensor, mask: Tensor, sequence_ids: Tensor, /) -> Result:
    """Takes equal slices of the pack for its sequences."""
    slices = torch.arange(mask.shape[0]) // 4
    return importance(log_ratio, mask, slices, level="geometric")


def metric_of_all_tokens(log_ratio: Tensor, mask: Tensor, sequence_ids: Tensor, /) -> Result:
    weight, _ = tis(log_ratio, mask, sequence_ids)
    return weight, {"mean_log_ratio": log_ratio.detach().mean().expand_as(log_ratio).clone()}


def scalar_metric(log_ratio: Tensor, mask: Tensor, sequence_ids: Tensor, /) -> Result:
    weight, _ = tis(log_ratio, mask, sequence_ids)
    return weight, {"mean": torch.where(mask, log_ratio.detach(), 0.0).sum() / mask.sum()}


class Faulty(CorrectionConformance):
    def make(self):
        return type(self).fault


class TestZeroOutsideTheMask(Faulty):
    fault = staticmethod(zero_outside_the_mask)
    caught_by = {
        "test_equal_policies_need_no_correction": "a ratio of 1 must give the weight 1",
        "test_untrained_tokens_have_weight_one": "1 outside the mask",
    }


class TestUnbounded(Faulty):
    fault = staticmethod(unbounded)
    caught_by = {
        "test_extreme_ratios_stay_finite": "+-1000",
    }


class TestLogRatioAsWeight(Faulty):
    fault = staticmethod(log_ratio_as_weight)
    caught_by = {
        "test_equal_policies_need_no_correction": "a ratio of 1 must give the weight 1",
        "test_weights_are_finite_and_not_negative": "negative weight",
    }


class TestCarriesGradient(Faulty):
    fault = staticmethod(carries_gradient)
    caught_by = {
        "test_the_weight_carries_no_gradient": "detach",
    }


class TestProductOverPrompts(Faulty):
    fault = staticmethod(product_over_prompts)
    caught_by = {
        "test_what_untrained_tokens_hold_does_not_matter": "changed a weight",
    }


class TestSequencesByPosition(Faulty):
    fault = staticmethod(sequences_by_position)
    caught_by = {
        "test_the_order_of_sequences_does_not_matter": "reordering",
    }


class TestMetricOfAllTokens(Faulty):
    fault = staticmethod(metric_of_all_tokens)
    caught_by = {
        "test_what_untrained_tokens_hold_does_not_matter": "changed the metric",
    }


class TestScalarMetric(Faulty):
    fault = staticmethod(scalar_metric)
    caught_by = {
        "test_extreme_ratios_stay_finite": "IndexError",
        "test_metrics_are_per_token": "expected [N]",
        "test_what_untrained_tokens_hold_does_not_matter": "IndexError",
    }
