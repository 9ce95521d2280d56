"""Wrong losses, each with one fault that some system has shipped. The kit must catch every one."""

from __future__ import annotations

from dataclasses import replace

import torch

from miles_core.algorithms.losses import ppo_clip
from miles_core.kinds.loss import LossInputs, LossOutput


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
