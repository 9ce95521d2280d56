"""Conformance kit for losses: loss and gradient do not depend on how an update is split into micro-batches.

    class TestMine(LossConformance):
        options = {"high": 0.28}
        def make(self) -> Loss: return my_loss

The policy is a tiny model in float64 (`log policy = log sigmoid(features @ theta)`), so that the gradient of a whole
update and the sum over its parts can be compared to 1e-6. A loss that takes a mean, a count or a statistic of its
micro-batch has another gradient when the update is split, and fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from miles_core.algorithms.reductions import REDUCTIONS, token_weights
from miles_core.batching import plan_micro_batches
from miles_core.kinds.loss import Loss, LossInputs, LossOutput

TOLERANCE = 1e-6
FEATURES = 5


@dataclass(frozen=True)
class Update:
    """All tokens of one optimizer step, with the reduction weights of the whole step."""

    lengths: tuple[int, ...]
    features: Tensor
    """f64[N, FEATURES]"""
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor
    """f64[N]"""

    def rows(self, sequence: int) -> slice:
        start = sum(self.lengths[:sequence])
        return slice(start, start + self.lengths[sequence])

    def sequence_ids(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))


def policy(theta: Tensor, features: Tensor) -> Tensor:
    return torch.nn.functional.logsigmoid(features @ theta)


def example_update(reduction: str = "token-mean") -> Update:
    """Seven sequences of very different lengths; prompts, a gap and one sequence that trains nothing."""
    generator = torch.Generator().manual_seed(20)
    lengths = (3, 11, 2, 7, 5, 1, 8)
    total = sum(lengths)
    features = torch.randn(total, FEATURES, generator=generator, dtype=torch.float64)
    mask = torch.rand(total, generator=generator) < 0.7
    update = Update(
        lengths=lengths,
        features=features,
        old_logprobs=policy(theta_of(0.9), features),
        advantages=torch.randn(len(lengths), generator=generator, dtype=torch.float64).repeat_interleave(
            torch.tensor(lengths)
        ),
        mask=mask,
        weights=torch.zeros(total, dtype=torch.float64),
    )
    mask[update.rows(2)] = False
    mask[update.rows(5)] = True
    weights = token_weights(mask.numpy(), update.sequence_ids().numpy(), reduction, fixed_length_tokens=16)
    update.weights.copy_(torch.from_numpy(weights))
    return update


def theta_of(scale: float) -> Tensor:
    return scale * torch.tensor([0.5, -0.3, 0.8, 0.1, -0.6], dtype=torch.float64)


ONE_BATCH = [[[0, 1, 2, 3, 4, 5, 6]]]
SPLITS: dict[str, list[list[list[int]]]] = {
    "one sequence each": [[[s] for s in range(7)]],
    "two halves": [[[0, 1, 2], [3, 4, 5, 6]]],
    "another order": [[[6, 0, 3], [5, 4, 1, 2]]],
    "two ranks": plan_micro_batches((3, 11, 2, 7, 5, 1, 8), 2, 12),
    "three ranks, one of them idle": [[[0, 1, 2, 3]], [[4, 5, 6]], [[]]],
}


class LossConformance:
    """Subclass it and say how to make the loss."""

    options: ClassVar[Mapping[str, Any]] = {}
    """Keyword arguments the loss is called with."""

    def make(self) -> Loss:
        raise NotImplementedError

    def call(self, inputs: LossInputs) -> LossOutput:
        return self.make()(inputs, **self.options)

    def inputs(self, update: Update, theta: Tensor, sequences: Sequence[int], padding: int = 0) -> LossInputs:
        """The micro-batch of `sequences`, each followed by `padding` untrained tokens that hold noise."""
        parts: dict[str, list[Tensor]] = {"logprobs": [], "old": [], "advantages": [], "mask": [], "ids": []}
        for place, sequence in enumerate(sequences):
            here = update.rows(sequence)
            parts["logprobs"] += [policy(theta, update.features[here]), torch.full((padding,), -3.0).double()]
            parts["old"] += [update.old_logprobs[here], torch.full((padding,), -0.5).double()]
            parts["advantages"] += [update.advantages[here], torch.full((padding,), 7.0).double()]
            parts["mask"] += [update.mask[here], torch.zeros(padding, dtype=torch.bool)]
            parts["ids"].append(torch.full((update.lengths[sequence] + padding,), place))
        empty = torch.zeros(0, dtype=torch.float64)
        joined = {name: torch.cat(tensors) if tensors else empty for name, tensors in parts.items()}
        return LossInputs(
            logprobs=joined["logprobs"],
            old_logprobs=joined["old"],
            advantages=joined["advantages"],
            mask=joined["mask"].bool(),
            sequence_ids=joined["ids"].long(),
        )

    def value_and_gradient(
        self, update: Update, split: list[list[list[int]]], padding: int = 0
    ) -> tuple[float, Tensor, Tensor]:
        """Loss, its gradient in theta [FEATURES], and per-token loss [N], summed as ranks sum their micro-batches."""
        total, gradient = 0.0, torch.zeros(FEATURES, dtype=torch.float64)
        per_token = torch.full_like(update.weights, torch.nan)
        for rank in split:
            for micro_batch in rank:
                theta = theta_of(1.0).requires_grad_()
                output = self.call(self.inputs(update, theta, micro_batch, padding)).per_token
                loss = torch.zeros((), dtype=torch.float64)
                start = 0
                for sequence in micro_batch:
                    here = update.rows(sequence)
                    found = output[start : start + update.lengths[sequence]]
                    loss = loss + (update.weights[here] * found).sum()
                    per_token[here] = found.detach()
                    start += update.lengths[sequence] + padding
                if micro_batch:
                    (part,) = torch.autograd.grad(loss, theta)
                    gradient += part
                total += float(loss.detach())
        return total, gradient, per_token

    def assert_same(self, update: Update, split: list[list[list[int]]], padding: int, what: str) -> None:
        value, gradient, per_token = self.value_and_gradient(update, ONE_BATCH)
        found_value, found_gradient, found_per_token = self.value_and_gradient(update, split, padding)
        assert torch.allclose(found_per_token, per_token, atol=TOLERANCE, rtol=0), (
            f"the loss of a token depends on {what}: it may depend on its own sequence alone"
        )
        assert found_value == pytest.approx(value, abs=TOLERANCE), f"the loss depends on {what}"
        assert torch.allclose(found_gradient, gradient, atol=TOLERANCE, rtol=0), (
            f"the gradient depends on {what}: one batch {gradient.tolist()}, found {found_gradient.tolist()}"
        )

    @pytest.mark.parametrize("reduction", REDUCTIONS)
    @pytest.mark.parametrize("split", SPLITS)
    def test_value_and_gradient_do_not_depend_on_micro_batches_or_ranks(self, split: str, reduction: str) -> None:
        self.assert_same(example_update(reduction), SPLITS[split], 0, f"the split ({split})")

    @pytest.mark.parametrize("padding", [1, 4])
    def test_value_and_gradient_do_not_depend_on_padding(self, padding: int) -> None:
        self.assert_same(example_update(), ONE_BATCH, padding, "padding")

    def test_a_token_depends_on_its_own_sequence_alone(self) -> None:
        update = example_update()
        changed = update.advantages.clone()
        changed[update.rows(1)] *= -5
        other = Update(**{**vars(update), "advantages": changed})
        _, _, before = self.value_and_gradient(update, ONE_BATCH)
        _, _, after = self.value_and_gradient(other, ONE_BATCH)
        elsewhere = torch.ones_like(update.mask)
        elsewhere[update.rows(1)] = False
        assert torch.allclose(before[elsewhere], after[elsewhere], atol=TOLERANCE, rtol=0), (
            "changing one sequence changed the loss of another"
        )

    def test_untrained_tokens_give_and_take_nothing(self) -> None:
        update = example_update()
        inputs = self.inputs(update, theta_of(1.0), ONE_BATCH[0][0])
        logprobs = inputs.logprobs.detach().requires_grad_()
        output = self.call(self._with(inputs, logprobs=logprobs)).per_token
        assert (output[~inputs.mask] == 0).all(), "the loss must be 0 outside the mask"
        (gradient,) = torch.autograd.grad(output.sum(), logprobs)
        assert (gradient[~inputs.mask] == 0).all(), "a token outside the mask received a gradient"
        noise = torch.where(inputs.mask, 0.0, 3.0)
        changed = self._with(
            inputs, old_logprobs=inputs.old_logprobs - noise, advantages=inputs.advantages * (1 + noise)
        )
        assert torch.equal(self.call(changed).per_token, self.call(inputs).per_token), (
            "what untrained tokens hold changed the loss"
        )

    def test_the_first_step_follows_the_policy_gradient(self) -> None:
        """At policy = old policy, descent raises the log-probs of good sequences and lowers those of bad ones."""
        logprobs = torch.tensor([-0.7, -1.2, -0.4, -2.0], dtype=torch.float64, requires_grad=True)
        inputs = LossInputs(
            logprobs=logprobs,
            old_logprobs=logprobs.detach().clone(),
            advantages=torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64),
            mask=torch.ones(4, dtype=torch.bool),
            sequence_ids=torch.tensor([0, 0, 1, 1]),
        )
        (gradient,) = torch.autograd.grad(self.call(inputs).per_token.sum(), logprobs)
        assert (gradient[:2] < 0).all(), "descent lowers the probability of a token with a positive advantage"
        assert (gradient[2:] > 0).all(), "descent raises the probability of a token with a negative advantage"

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_extreme_ratios_stay_finite(self, dtype: torch.dtype) -> None:
        logprobs = torch.tensor([-0.01, -300.0, -0.01, -300.0, -1.0], dtype=dtype, requires_grad=True)
        inputs = LossInputs(
            logprobs=logprobs,
            old_logprobs=torch.tensor([-300.0, -0.01, -300.0, -0.01, -1.0], dtype=dtype),
            advantages=torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0], dtype=dtype),
            mask=torch.ones(5, dtype=torch.bool),
            sequence_ids=torch.arange(5),
        )
        output = self.call(inputs)
        (gradient,) = torch.autograd.grad(output.per_token.sum(), logprobs)
        assert output.per_token.dtype is dtype, f"the loss must keep {dtype}"
        assert output.per_token.isfinite().all(), f"loss {output.per_token.tolist()} at log-ratios of +-300"
        assert gradient.isfinite().all(), f"gradient {gradient.tolist()} at log-ratios of +-300"

    def test_metrics_are_per_token_and_carry_no_gradient(self) -> None:
        update = example_update()
        inputs = self.inputs(update, theta_of(1.0).requires_grad_(), ONE_BATCH[0][0])
        for name, values in self.call(inputs).metrics.items():
            assert values.shape == inputs.mask.shape, f"metric {name!r} has shape {tuple(values.shape)}, expected [N]"
            assert not values.requires_grad, f"metric {name!r} keeps the graph of the whole micro-batch alive"
            assert values[inputs.mask].isfinite().all(), f"metric {name!r} is not finite"

    def test_the_loss_is_pure(self) -> None:
        update = example_update()
        inputs = self.inputs(update, theta_of(1.0), ONE_BATCH[0][0])
        before = {name: value.clone() for name, value in _tensors(inputs).items()}
        first, second = self.call(inputs).per_token, self.call(inputs).per_token
        assert torch.equal(first, second), "two calls with the same inputs differ"
        for name, value in _tensors(inputs).items():
            assert torch.equal(value, before[name]), f"the loss changed its input `{name}`"

    def _with(self, inputs: LossInputs, **changes: Tensor) -> LossInputs:
        return LossInputs(**{**_tensors(inputs), **changes})


def _tensors(inputs: LossInputs) -> dict[str, Tensor]:
    names = ("logprobs", "old_logprobs", "advantages", "mask", "sequence_ids")
    return {name: getattr(inputs, name) for name in names}
