"""Backward passes of the operators, against autograd in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from miles_core.numerics import ops
from miles_core.numerics.spans import Span, Spans


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "linear": (ops.linear, F.linear, [(2, 5, 12), (7, 12)]),
    "rms_norm": (lambda x, w: ops.rms_norm(x, w, 1e-6), plain_norm, [(2, 5, 12), (12,)]),
    "silu_mul": (ops.silu_mul, lambda g, u: F.silu(g) * u, [(2, 5, 12), (2, 5, 12)]),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_plain_operation(name: str) -> None:
    ours, plain, shapes = CASES[name]
    rng = torch.Generator().manual_seed(1)
    inputs = [torch.randn(shape, generator=rng).requires_grad_() for shape in shapes]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    found, wanted = ours(*inputs), plain(*wide)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    weights = torch.randn(found.shape, generator=rng)
    found.backward(weights)  # type: ignore[no-untyped-call]
    wanted.backward(weights.double())  # type: ignore[no-untyped-call]
    for one, other in zip(inputs, wide, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-4, atol=1e-5)


def test_attention_differentiates_what_it_is_given() -> None:
    rng = torch.Generator().manual_seed(1)
    inputs = [torch.randn(9, heads, 8, generator=rng).requires_grad_() for heads in (4, 2, 2)]

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.4, enable_gqa=True)[0].transpose(0, 1)

    weights = torch.randn(9, 4, 8, generator=rng)
    found = torch.autograd.grad(
        (ops.attention(*inputs, Spans([Span(0, 9, 0, 0)]), 0.4, gradient=plain) * weights).sum(), inputs
    )
    wanted = torch.autograd.grad((plain(*inputs) * weights).sum(), inputs)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_without_gradients_the_values_are_the_same() -> None:
    rng = torch.Generator().manual_seed(1)
    x, w = torch.randn(5, 12, generator=rng), torch.randn(7, 12, generator=rng).requires_grad_()
    with torch.no_grad():
        assert torch.equal(ops.linear(x, w), ops.linear(x, w).detach())
    assert torch.equal(ops.linear(x, w).detach(), ops.linear(x, w.detach()))
