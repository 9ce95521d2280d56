"""The operators as models call them: the invariant forward of the tensor's device, and an ordinary backward.

Only values must agree between engine and trainer, and only the forward makes values that both compute; gradients use
the fastest product there is.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from miles_core.numerics import cpu
from miles_core.numerics.spans import Spans

Gradient = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A differentiable attention over the same queries, keys and values, for the backward pass."""


def _cuda() -> ModuleType:
    from miles_core.numerics import cuda  # Triton exists where CUDA does

    return cuda


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        return (
            grad @ weight if ctx.needs_input_grad[0] else None,
            grad.t() @ x if ctx.needs_input_grad[1] else None,
        )


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    found: Tensor = (_cuda() if x.is_cuda else cpu).linear(x, weight)
    return found


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``f[..., K], f[N, K] -> f[..., N]`` in x's dtype, summed in float32."""
    rows = x.reshape(-1, x.shape[-1])
    found: Tensor = _Linear.apply(rows, weight) if torch.is_grad_enabled() else _linear(rows, weight)  # type: ignore[no-untyped-call]
    return found.view(*x.shape[:-1], weight.shape[0])


class _RmsNorm(Function):
    """``y = w * x * r``, ``r = 1 / sqrt(mean x^2 + eps)``; dx = r (g - x r^2 mean(g x)) with g = w dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        found: tuple[Tensor, Tensor] = (_cuda() if x.is_cuda else cpu).rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, found[1])
        return found[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        wide, grad, r = x.float(), grads[0].float(), inverse[:, None]
        g = grad * weight.float()
        dx = r * (g - wide * r.square() * (g * wide).mean(-1, keepdim=True))
        return dx.to(x.dtype), (grad * wide * r).sum(0).to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``f[..., K], f[K] -> f[..., K]``: normalised in float32, rounded to x's dtype, then times the weight."""
    rows = x.reshape(-1, x.shape[-1])
    if not torch.is_grad_enabled():
        plain: Tensor = (_cuda() if x.is_cuda else cpu).rms_norm(rows, weight, eps)[0]
        return plain.view(x.shape)
    found: Tensor = _RmsNorm.apply(rows, weight, eps)  # type: ignore[no-untyped-call]
    return found.view(x.shape)


class _SiluMul(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        found: Tensor = (_cuda() if gate.is_cuda else cpu).silu_mul(gate, up)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        g, grad = gate.float(), grads[0].float()
        s = torch.sigmoid(g)
        return (grad * up.float() * s * (1 + g * (1 - s))).to(gate.dtype), (grad * g * s).to(up.dtype)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` in float32, rounded once; any equal shapes."""
    found: Tensor = _SiluMul.apply(gate, up)  # type: ignore[no-untyped-call]
    return found


def logsumexp(x: Tensor) -> Tensor:
    """``f32[M, N] -> f32[M]``; without a gradient, whoever needs one has it in closed form."""
    found: Tensor = (_cuda() if x.is_cuda else cpu).logsumexp(x)
    return found


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, values: Tensor, spans: Spans, scale: float, gradient: Gradient
    ) -> Tensor:
        ctx.save_for_backward(query, keys, values)
        ctx.gradient = gradient
        return _attention(query, keys, values, spans, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.gradient(*inputs)
        return (*torch.autograd.grad(output, inputs, grads[0]), None, None, None)


def _attention(query: Tensor, keys: Tensor, values: Tensor, spans: Spans, scale: float) -> Tensor:
    if query.is_cuda:
        found: Tensor = _cuda().attention(query, keys, values, spans, scale)
        return found
    return cpu.attention(query, keys, values, spans.tiles(cpu.QUERIES), scale)


def attention(
    query: Tensor, keys: Tensor, values: Tensor, spans: Spans, scale: float, *, gradient: Gradient | None = None
) -> Tensor:
    """Causal attention of every span over its own keys.

    Args:
        query: ``[T, Q, D]``; the spans cover all T tokens.
        keys, values: ``[rows, H, D]``, a span's keys from its `kv_row` on; H divides Q.
        gradient: What the backward pass differentiates; without it there is none.

    Returns:
        ``[T, Q, D]``
    """
    if gradient is None or not torch.is_grad_enabled():
        return _attention(query, keys, values, spans, scale)
    found: Tensor = _Attention.apply(query, keys, values, spans, scale, gradient)  # type: ignore[no-untyped-call]
    return found
