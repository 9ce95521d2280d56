"""Collectives with a gradient that Megatron does not offer in this form."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function


def _all_to_all(parts: Tensor, group: Any) -> Tensor:
    """f[P, …] -> f[P, …]: part i goes to rank i, and comes from it."""
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


class _TokensToHeads(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _to_heads(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _to_tokens(grads[0], ctx.group), None


class _HeadsToTokens(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _to_tokens(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _to_heads(grads[0], ctx.group), None


def _to_heads(x: Tensor, group: Any) -> Tensor:
    size = group.size()
    n, heads, width = x.shape
    parts = x.reshape(n, size, heads // size, width).transpose(0, 1)
    return _all_to_all(parts, group).reshape(size * n, heads // size, width)


def _to_tokens(x: Tensor, group: Any) -> Tensor:
    size = group.size()
    total, heads, width = x.shape
    parts = _all_to_all(x.reshape(size, total // size, heads, width), group)
    return parts.transpose(0, 1).reshape(total // size, size * heads, width)


def tokens_to_heads(x: Tensor, group: Any) -> Tensor:
    """f[n, h, d] of this rank's tokens -> f[P n, h / P, d] of this rank's heads; P ranks, tokens in rank order."""
    result: Tensor = _TokensToHeads.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def heads_to_tokens(x: Tensor, group: Any) -> Tensor:
    """Undo `tokens_to_heads`."""
    result: Tensor = _HeadsToTokens.apply(x, group)  # type: ignore[no-untyped-call]
    return result


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def gather_scored(values: Tensor, group: Any) -> Tensor:
    """Add up what each rank holds of a vector; every rank then computes the same loss, so the gradient passes as it is.

    Args:
        values: f[K], 0 where another rank holds the value.
    """
    result: Tensor = _Sum.apply(values, group)  # type: ignore[no-untyped-call]
    return result
