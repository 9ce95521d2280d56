"""KL estimators: values, expectations, and the gradient each gives, by exact enumeration of a small distribution."""

from __future__ import annotations

import math

import pytest
import torch

from miles_core.algorithms import kl

F64 = torch.float64


def test_estimators_equal_their_formulas() -> None:
    logprobs, reference = torch.tensor([-1.0, -0.5], dtype=F64), torch.tensor([-1.5, -0.1], dtype=F64)
    d = [0.5, -0.4]
    assert kl.k1(logprobs, reference).tolist() == pytest.approx(d)
    assert kl.k2(logprobs, reference).tolist() == pytest.approx([x * x / 2 for x in d])
    assert kl.k3(logprobs, reference).tolist() == pytest.approx([math.exp(-x) - 1 + x for x in d])
    assert kl.estimate("k2", logprobs, reference).tolist() == kl.k2(logprobs, reference).tolist()


class Enumerated:
    """A policy and a reference over four outcomes, so that every expectation is an exact sum."""

    def __init__(self) -> None:
        self.logits = torch.tensor([0.3, -0.8, 1.1, 0.2], dtype=F64, requires_grad=True)
        self.log_policy = self.logits.log_softmax(0)
        self.log_reference = torch.tensor([0.5, 0.1, -0.4, 0.9], dtype=F64).log_softmax(0)

    def reverse_kl(self) -> torch.Tensor:
        return (self.log_policy.exp() * (self.log_policy - self.log_reference)).sum()

    def forward_kl(self) -> torch.Tensor:
        return (self.log_reference.exp() * (self.log_reference - self.log_policy)).sum()

    def gradient(self, objective: torch.Tensor) -> torch.Tensor:
        (found,) = torch.autograd.grad(objective, self.logits)
        return found

    def mean_loss_gradient(self, name: str) -> torch.Tensor:
        """Expectation over sampled outcomes of the estimator's gradient as a loss: the samples are constants."""
        samples = self.log_policy.detach().exp()
        return self.gradient((samples * kl.estimate(name, self.log_policy, self.log_reference)).sum())

    def mean_reward_gradient(self, name: str) -> torch.Tensor:
        """Expectation of the policy gradient of minus the estimator as a reward, as a loss: E[k grad log policy]."""
        estimate = kl.estimate(name, self.log_policy, self.log_reference).detach()
        return self.gradient((self.log_policy.detach().exp() * estimate * self.log_policy).sum())


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_k1_and_k3_have_the_kl_as_their_mean(name: str) -> None:
    world = Enumerated()
    mean = (world.log_policy.exp() * kl.estimate(name, world.log_policy, world.log_reference)).sum()
    assert float(mean.detach()) == pytest.approx(float(world.reverse_kl().detach()), abs=1e-12)


def test_k1_as_a_loss_carries_no_signal() -> None:
    assert torch.allclose(Enumerated().mean_loss_gradient("k1"), torch.zeros(4, dtype=F64), atol=1e-12)


def test_k2_as_a_loss_has_the_gradient_of_the_reverse_kl() -> None:
    assert torch.allclose(Enumerated().mean_loss_gradient("k2"), _gradient_of("reverse"), atol=1e-12)


def test_k3_as_a_loss_has_the_gradient_of_the_forward_kl() -> None:
    assert torch.allclose(Enumerated().mean_loss_gradient("k3"), _gradient_of("forward"), atol=1e-12)


def test_only_k1_in_the_reward_has_the_gradient_of_the_reverse_kl() -> None:
    exact = _gradient_of("reverse")
    assert torch.allclose(Enumerated().mean_reward_gradient("k1"), exact, atol=1e-12)
    for name in ("k2", "k3"):
        assert not torch.allclose(Enumerated().mean_reward_gradient(name), exact, atol=1e-2)


def _gradient_of(which: str) -> torch.Tensor:
    world = Enumerated()
    return world.gradient(world.reverse_kl() if which == "reverse" else world.forward_kl())


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_k3_is_finite_and_never_negative_at_extremes(dtype: torch.dtype) -> None:
    d = torch.tensor([-1e4, -90.0, -1e-3, 0.0, 1e-3, 90.0, 1e4], dtype=dtype, requires_grad=True)
    value = kl.k3(d, torch.zeros_like(d))
    (gradient,) = torch.autograd.grad(value.sum(), d)
    assert value.isfinite().all()
    assert (value >= 0).all()
    assert value[3] == 0
    assert gradient.isfinite().all()
    # A clamp of the exponential alone would leave +1 here: lowering the loss would lower the policy further.
    assert (gradient[:2] <= 0).all()


def test_k3_keeps_its_digits_near_zero() -> None:
    d = torch.tensor([1e-3], dtype=torch.float32)
    assert kl.k3(d, torch.zeros_like(d)).item() == pytest.approx(1e-6 / 2 - 1e-9 / 6, rel=1e-3)
