"""Policy losses against scalar loops in float64 and gradients worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.algorithms import losses
from miles_core.kinds.loss import LossInputs, LossOutput

F64 = torch.float64


def inputs(
    ratios: list[float], advantages: list[float], mask: list[int] | None = None, sequences: list[int] | None = None
) -> LossInputs:
    """Tokens of probability ``0.1 * ratio`` under the policy and 0.1 under the old one."""
    ratio = torch.tensor(ratios, dtype=F64)
    return LossInputs(
        logprobs=(ratio.log() + math.log(0.1)).requires_grad_(),
        old_logprobs=torch.full_like(ratio, math.log(0.1)),
        advantages=torch.tensor(advantages, dtype=F64),
        mask=torch.tensor([bool(m) for m in mask or [1] * len(ratios)]),
        sequence_ids=torch.tensor(sequences or [0] * len(ratios)),
    )


def gradient(output: LossOutput, batch: LossInputs) -> list[float]:
    (found,) = torch.autograd.grad(output.per_token.sum(), batch.logprobs)
    return found.tolist()  # type: ignore[no-any-return]


def test_ppo_clip_takes_the_pessimistic_branch_on_each_side() -> None:
    batch = inputs([1.5, 0.5, 1.5, 0.5, 1.1], [2.0, 2.0, -2.0, -2.0, -1.0])
    output = losses.ppo_clip(batch, low=0.2, high=0.3)
    assert output.per_token.tolist() == pytest.approx([-1.3 * 2, -0.5 * 2, 1.5 * 2, 0.8 * 2, 1.1])
    # d/dlogp of -rho A is -rho A where it is not clipped, 0 where it is.
    assert gradient(output, batch) == pytest.approx([0, -1.0, 3.0, 0, 1.1])
    assert output.metrics["clip_fraction_high"].tolist() == [1, 0, 0, 0, 0]
    assert output.metrics["clip_fraction_low"].tolist() == [0, 0, 0, 1, 0]
    assert output.metrics["ratio"].tolist() == pytest.approx([1.5, 0.5, 1.5, 0.5, 1.1])
    assert output.metrics["approx_kl"].tolist() == pytest.approx(
        [r - 1 - math.log(r) for r in (1.5, 0.5, 1.5, 0.5, 1.1)]
    )


def test_ppo_clip_is_symmetric_when_only_low_is_given() -> None:
    batch = inputs([1.5], [1.0])
    assert losses.ppo_clip(batch, low=0.1).per_token.tolist() == pytest.approx([-1.1])


def test_dual_clip_bounds_the_loss_of_negative_advantages_only() -> None:
    batch = inputs([5.0, 5.0, 2.0], [-1.0, 1.0, -1.0])
    output = losses.ppo_clip(batch, low=0.2, dual_clip=3.0)
    assert output.per_token.tolist() == pytest.approx([3.0, -1.2, 2.0])
    assert gradient(output, batch) == pytest.approx([0, 0, 2.0])
    assert output.metrics["clip_fraction_dual"].tolist() == [1, 0, 0]


def test_gspo_clips_the_length_normalised_sequence_ratio_and_shares_its_gradient() -> None:
    # Sequence 0: ratios 2 and 1/2 average to log-ratio 0; sequence 1: one trained token of ratio 1.2, clipped at 1.1.
    batch = inputs([2.0, 0.5, 1.2, 9.0], [1.0, 1.0, 3.0, 3.0], [1, 1, 1, 0], [0, 0, 1, 1])
    output = losses.gspo(batch, low=0.1, high=0.1)
    assert output.per_token.tolist() == pytest.approx([-1.0, -1.0, -1.1 * 3, 0])
    assert output.metrics["clip_fraction_high"].tolist() == [0, 0, 1, 0]
    # The sum over a sequence's tokens of -s A has gradient -s A at each of them: n tokens times s A / n.
    assert gradient(output, batch) == pytest.approx([-1.0, -1.0, 0, 0])


def test_gspo_gradient_under_the_sequence_mean_is_that_of_the_papers_objective() -> None:
    torch.manual_seed(0)
    logprobs = (-torch.rand(7, dtype=F64) - 0.1).requires_grad_()
    old = logprobs.detach() + 1e-4 * torch.randn(7, dtype=F64)
    sequence_ids = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    mask = torch.tensor([0, 1, 1, 1, 1, 0, 1]).bool()
    rewards = torch.tensor([0.7, -1.3], dtype=F64)
    batch = LossInputs(
        logprobs=logprobs, old_logprobs=old, advantages=rewards[sequence_ids], mask=mask, sequence_ids=sequence_ids
    )
    weights = torch.where(mask, torch.tensor([0.5 / 2, 0.5 / 3], dtype=F64)[sequence_ids], 0.0)
    (found,) = torch.autograd.grad((weights * losses.gspo(batch, low=0.2, high=0.2).per_token).sum(), logprobs)

    objective = torch.zeros((), dtype=F64)  # eq. 5: mean over sequences of min(s A, clip(s) A), here far from the clip
    for sequence in (0, 1):
        here = mask & (sequence_ids == sequence)
        objective = objective - 0.5 * (logprobs - old)[here].mean().exp() * rewards[sequence]
    (expected,) = torch.autograd.grad(objective, logprobs)
    assert torch.allclose(found, expected, atol=1e-12, rtol=0)


def test_cispo_keeps_the_gradient_of_clipped_tokens_with_a_bounded_weight() -> None:
    batch = inputs([8.0, 0.1, 1.0], [1.0, -2.0, 0.5])
    output = losses.cispo(batch, low=0.5, high=4.0)
    logp = [math.log(0.8), math.log(0.01), math.log(0.1)]
    assert output.per_token.tolist() == pytest.approx([-5 * logp[0], 0.5 * 2 * logp[1], -0.5 * logp[2]])
    # No gradient through the weight: d/dlogp = -weight A.
    assert gradient(output, batch) == pytest.approx([-5.0, 1.0, -0.5])
    assert output.metrics["clip_fraction_high"].tolist() == [1, 0, 0]
    assert output.metrics["clip_fraction_low"].tolist() == [0, 1, 0]


def test_cispo_leaves_small_ratios_alone_by_default() -> None:
    batch = inputs([0.01], [1.0])
    assert gradient(losses.cispo(batch), batch) == pytest.approx([-0.01])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-2, 2), st.booleans()), min_size=1, max_size=8))
def test_ppo_clip_equals_a_scalar_loop(tokens: list[tuple[float, float, bool]]) -> None:
    low, high, dual = 0.2, 0.28, 3.0
    batch = inputs([math.exp(d) for d, _, _ in tokens], [a for _, a, _ in tokens], [int(m) for _, _, m in tokens])
    expected = []
    for log_ratio, advantage, trained in tokens:
        ratio = math.exp(log_ratio)
        loss = max(-ratio * advantage, -min(max(ratio, 1 - low), 1 + high) * advantage)
        if advantage < 0:
            loss = min(loss, -dual * advantage)
        expected.append(loss if trained else 0.0)
    found = losses.ppo_clip(batch, low=low, high=high, dual_clip=dual).per_token
    assert found.tolist() == pytest.approx(expected, abs=1e-9)


def test_nan_at_a_trained_token_reaches_the_loss() -> None:
    # The step's non-finite policy decides what NaN does; a loss that hides it would train silently on the rest.
    for fn in (losses.ppo_clip, losses.gspo, losses.cispo):
        batch = inputs([math.nan, 1.0], [1.0, 1.0])
        assert fn(batch).per_token.isnan().any()


def test_an_empty_micro_batch_gives_an_empty_loss() -> None:
    empty = torch.zeros(0, dtype=F64)
    batch = LossInputs(
        logprobs=empty, old_logprobs=empty, advantages=empty, mask=empty.bool(), sequence_ids=empty.long()
    )
    for fn in (losses.ppo_clip, losses.gspo, losses.cispo):
        assert fn(batch).per_token.shape == (0,)
