"""Log-prob and entropy where each tensor-parallel rank holds some rows of the vocabulary.

Definition, shared with the engine: log-softmax in float32, over the whole vocabulary, of logits over temperature.
Letters: K scored positions, H hidden width, v rows of the vocabulary on this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

_FLOOR = -1e4
"""Below it p is 0 in any dtype; p * log p must not be 0 * -infinity."""


class _Score(Function):
    """(logits f[K, v], targets i64[K] counted from this rank's first row, 1 / T f[K]) -> (log-prob, entropy) f32[K].

    With z = logits / T, p = softmax(z) and l = log p:  d l[target] = onehot - p,  d H = -p (l + H),  both times 1 / T.
    Normaliser, target's logit and entropy are sums over ranks; all else is local.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, inverse: Tensor, rows: int, group: Any, entropy_grad: bool
    ) -> tuple[Tensor, Tensor]:
        scaled = _scale(logits, inverse, rows)
        top = scaled.amax(-1)
        _reduce(top, group, dist.ReduceOp.MAX)
        shifted = scaled.sub_(top[:, None])
        exponent = shifted.exp()
        here = (targets >= 0) & (targets < logits.shape[1])
        chosen = shifted.gather(-1, targets.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        sums = torch.stack(
            [
                exponent.sum(-1),
                torch.where(here, chosen, 0.0),
                (exponent * shifted.clamp_min(_FLOOR)).sum(-1),
            ]
        )
        _reduce(sums, group, dist.ReduceOp.SUM)
        total, chosen, weighted = sums.unbind(0)
        logprob = chosen - total.log()
        entropy = total.log() - weighted / total
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        ctx.rows, ctx.entropy_grad = rows, entropy_grad
        ctx.save_for_backward(logits, targets, inverse, top + total.log(), entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        logits, targets, inverse, normaliser, entropy = ctx.saved_tensors
        grad_logprob, grad_entropy = grads
        log_p = _scale(logits, inverse, ctx.rows).sub_(normaliser[:, None])
        p = log_p.exp()
        if ctx.entropy_grad:
            factor = log_p.clamp_min_(_FLOOR).add_(entropy[:, None]).mul_(grad_entropy[:, None])
            grad = factor.add_(grad_logprob[:, None]).mul_(p).neg_()
        else:
            grad = p.mul_(-grad_logprob[:, None])
        here = (targets >= 0) & (targets < logits.shape[1])
        at = targets.clamp(0, logits.shape[1] - 1)[:, None]
        grad.scatter_add_(-1, at, torch.where(here, grad_logprob, 0.0)[:, None])
        grad.mul_(inverse.to(grad.dtype)[:, None])
        return grad.to(logits.dtype), None, None, None, None, None


def _scale(logits: Tensor, inverse: Tensor, rows: int) -> Tensor:
    """A new tensor, at least float32; rows that only fill up the vocabulary are impossible."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    scaled = logits.to(wide) * inverse.to(wide)[:, None]
    if rows < logits.shape[1]:
        scaled[:, rows:] = -torch.inf
    return scaled


def _reduce(x: Tensor, group: Any, op: Any) -> None:
    if group.size() > 1:
        dist.all_reduce(x, op=op, group=group)


class _Copied(Function):
    """The same on every rank; gradients of the ranks' shares add up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0]
        if ctx.group.size() > 1:
            grad = grad.contiguous()
            dist.all_reduce(grad, group=ctx.group)
        return grad, None


def score_hidden(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    inverse_temperature: Tensor,
    *,
    vocab: int,
    group: Any,
    chunk_tokens: int,
    entropy_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Score in chunks; logits of at most `chunk_tokens` positions exist at one time.

    Args:
        hidden: f[K, H], the same on every rank of `group`.
        weight: f[v, H] this rank's rows of the output embedding.
        targets: i64[K]
        inverse_temperature: f[K], 1 / T.
        vocab: Rows of the vocabulary that are tokens, over all ranks.

    Returns:
        Log-prob and entropy, f32[K] each, equal on every rank.
    """
    first = group.rank() * weight.shape[0]
    rows = max(0, min(weight.shape[0], vocab - first))

    def one(hidden: Tensor, weight: Tensor, targets: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
        copied = _Copied.apply(hidden, group)  # type: ignore[no-untyped-call]
        logprob, entropy = _Score.apply(  # type: ignore[no-untyped-call]
            F.linear(copied, weight), targets - first, inverse, rows, group, entropy_grad
        )
        return logprob, entropy

    total = hidden.shape[0]
    if total <= chunk_tokens:
        return one(hidden, weight, targets, inverse_temperature)
    parts = []
    for start in range(0, total, chunk_tokens):
        end = start + chunk_tokens
        inputs = (hidden[start:end], weight, targets[start:end], inverse_temperature[start:end])
        parts.append(checkpoint(one, *inputs, use_reentrant=False) if torch.is_grad_enabled() else one(*inputs))
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
