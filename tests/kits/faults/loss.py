"""Wrong losses, each with one fault that some system has shipped. The kit must catch every one."""

from __future__ import annotations

from dataclasses import replace

import torch

from miles_core.algorithms.losses import ppo_clip
from miles_core.kinds.loss import LossInputs, LossOutput
from miles_core.testing.loss import LossConformance


def mean_over_micro_batch(inputs: LossInputs, /) -> LossOutput:
    """Divides by its own trained tokens: a mean of means once the micro-batches differ."""
    right = ppo_clip(inputs)
    return replace(right, per_token=right.per_token / inputs.mask.sum().clamp(min=1))


def mean_over_padded_tokens(inputs: LossInputs, /) -> LossOutput:
    """Divides by all tokens it sees, padding included."""
    right = ppo_clip(inputs)
    return replace(right, per_token=right.per_token / max(inputs.mask.numel(), 1))


def whitens_in_micro_batch(inputs: LossInputs, /) -> LossOutput:
    """Normalises the advantages of whatever happens to be packed together."""
    trained = inputs.advantages[inputs.mask]
    centred = inputs.advantages - (trained.mean() if trained.numel() else 0.0)
    return ppo_clip(replace(inputs, advantages=centred))


def packed_sequence_ratio(inputs: LossInputs, /) -> LossOutput:
    """A sequence ratio that takes the packed micro-batch for one sequence."""
    mask = inputs.mask
    log_ratio = torch.where(mask, inputs.logprobs - inputs.old_logprobs, 0.0).clamp(-20, 20)
    ratio = (log_ratio.sum() / mask.sum().clamp(min=1)).exp()
    return LossOutput(per_token=torch.where(mask, -ratio * inputs.advantages, 0.0))


def shifted_by_one(inputs: LossInputs, /) -> LossOutput:
    """Scores each token with its neighbour's log-prob, across sequence boundaries too."""
    return ppo_clip(replace(inputs, logprobs=inputs.logprobs.roll(1)))


def forgets_the_mask(inputs: LossInputs, /) -> LossOutput:
    return ppo_clip(replace(inputs, mask=torch.ones_like(inputs.mask)))


def wrong_sign(inputs: LossInputs, /) -> LossOutput:
    return ppo_clip(replace(inputs, advantages=-inputs.advantages))


def overflows(inputs: LossInputs, /) -> LossOutput:
    ratio = torch.where(inputs.mask, inputs.logprobs - inputs.old_logprobs, 0.0).exp()
    return LossOutput(per_token=torch.where(inputs.mask, -ratio * inputs.advantages, 0.0))


def attached_metrics(inputs: LossInputs, /) -> LossOutput:
    return replace(ppo_clip(inputs), metrics={"logprob": inputs.logprobs})


def changes_its_input(inputs: LossInputs, /) -> LossOutput:
    right = ppo_clip(replace(inputs, advantages=inputs.advantages.clone()))
    inputs.advantages.mul_(0.5)
    return right


class Faulty(LossConformance):
    def make(self):
        return type(self).fault


class TestMeanOverMicroBatch(Faulty):
    fault = staticmethod(mean_over_micro_batch)
    caught_by = {
        "test_value_and_gradient_do_not_depend_on_micro_batches_or_ranks": "depends on the split",
    }


class TestMeanOverPaddedTokens(Faulty):
    fault = staticmethod(mean_over_padded_tokens)
    caught_by = {
        "test_value_and_gradient_do_not_depend_on_micro_batches_or_ranks": "depends on the split",
        "test_value_and_gradient_do_not_depend_on_padding": "depends on padding",
    }


class TestWhitensInMicroBatch(Faulty):
    fault = staticmethod(whitens_in_micro_batch)
    caught_by = {
        "test_a_token_depends_on_its_own_sequence_alone": "changed the loss of another",
        "test_value_and_gradient_do_not_depend_on_micro_batches_or_ranks": "depends on the split",
    }


class TestPackedSequenceRatio(Faulty):
    fault = staticmethod(packed_sequence_ratio)
    caught_by = {
        "test_the_first_step_follows_the_policy_gradient": "descent lowers the probability",
        "test_value_and_gradient_do_not_depend_on_micro_batches_or_ranks": "depends on the split",
    }


class TestShiftedByOne(Faulty):
    fault = staticmethod(shifted_by_one)
    caught_by = {
        "test_the_first_step_follows_the_policy_gradient": "descent lowers the probability",
        "test_untrained_tokens_give_and_take_nothing": "outside the mask",
        "test_value_and_gradient_do_not_depend_on_micro_batches_or_ranks": "depends on the split",
        "test_value_and_gradient_do_not_depend_on_padding": "depends on padding",
    }


class TestForgetsTheMask(Faulty):
    fault = staticmethod(forgets_the_mask)
    caught_by = {
        "test_untrained_tokens_give_and_take_nothing": "outside the mask",
    }


class TestWrongSign(Faulty):
    fault = staticmethod(wrong_sign)
    caught_by = {
        "test_the_first_step_follows_the_policy_gradient": "descent lowers the probability",
    }


class TestOverflows(Faulty):
    fault = staticmethod(overflows)
    caught_by = {
        "test_extreme_ratios_stay_finite": "at log-ratios of +-300",
    }


class TestAttachedMetrics(Faulty):
    fault = staticmethod(attached_metrics)
    caught_by = {
        "test_metrics_are_per_token_and_carry_no_gradient": "keeps the graph",
    }


class TestChangesItsInput(Faulty):
    fault = staticmethod(changes_its_input)
    caught_by = {
        "test_the_loss_is_pure": "two calls",
    }
