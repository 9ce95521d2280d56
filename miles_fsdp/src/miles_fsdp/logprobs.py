"""Log-prob and entropy of tokens, without ever holding full-vocabulary logits of a whole batch.

Definition, shared with the engine: log-softmax in float32, over the whole vocabulary, of logits over temperature.
Letters: K scored positions, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

Normalise = Callable[[Tensor], Tensor]
"""``f[K, V] -> f[K]`` in the same dtype."""


def log_sum_exp(scaled: Tensor) -> Tensor:
    return scaled.logsumexp(-1)


class _Score(Function):
    """(logits f[K, V], targets i64[K], inverse temperature f[K]) -> (log-prob, entropy), each f32[K] (f64 for f64).

    By hand, since autograd would keep three float32 copies of the logits. With z = logits / T, p = softmax(z) and
    l = log p:  d l[target] = onehot - p,  d H = -p * (l + H),  and both times 1 / T.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, inverse_temperature: Tensor, entropy_grad: bool, normalise: Normalise
    ) -> tuple[Tensor, Tensor]:
        scaled = _scale(logits, inverse_temperature)
        normaliser = normalise(scaled)
        logprob = scaled.gather(-1, targets[:, None])[:, 0] - normaliser
        log_p = scaled.sub_(normaliser[:, None])
        # p * log p is 0 where p is 0, also for logits of -inf.
        entropy = -(log_p.exp() * log_p.clamp_min(torch.finfo(log_p.dtype).min)).sum(-1)
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        ctx.entropy_grad = entropy_grad
        ctx.save_for_backward(logits, targets, inverse_temperature, normaliser, entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, targets, inverse_temperature, normaliser, entropy = ctx.saved_tensors
        grad_logprob, grad_entropy = grads
        log_p = _scale(logits, inverse_temperature).sub_(normaliser[:, None])
        p = log_p.exp()
        if ctx.entropy_grad:
            factor = log_p.clamp_min_(torch.finfo(log_p.dtype).min).add_(entropy[:, None]).mul_(grad_entropy[:, None])
            grad = factor.add_(grad_logprob[:, None]).mul_(p).neg_()
        else:
            grad = p.mul_(-grad_logprob[:, None])
        grad.scatter_add_(-1, targets[:, None], grad_logprob[:, None])
        grad.mul_(inverse_temperature.to(grad.dtype)[:, None])
        return grad.to(logits.dtype), None, None, None, None


def _scale(logits: Tensor, inverse_temperature: Tensor) -> Tensor:
    """A new tensor, at least float32."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(wide) * inverse_temperature.to(wide)[:, None]


def score(
    logits: Tensor,
    targets: Tensor,
    inverse_temperature: Tensor,
    *,
    entropy_grad: bool = True,
    normalise: Normalise = log_sum_exp,
) -> tuple[Tensor, Tensor]:
    """Log-prob of `targets` and entropy of the policy at each position.

    Args:
        logits: f[K, V]
        targets: i64[K]
        inverse_temperature: f[K], 1 / T.
        entropy_grad: Let the entropy carry a gradient; False saves a pass over the logits.
        normalise: Log-sum-exp over the vocabulary; values only, the gradient is in closed form.

    Returns:
        Two f32[K] (f64 for f64 logits), differentiable once in `logits`.
    """
    logprob, entropy = _Score.apply(  # type: ignore[no-untyped-call]
        logits, targets, inverse_temperature, entropy_grad, normalise
    )
    return logprob, entropy


def score_hidden(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    inverse_temperature: Tensor,
    *,
    chunk_tokens: int,
    entropy_grad: bool = True,
    normalise: Normalise = log_sum_exp,
) -> tuple[Tensor, Tensor]:
    """`score` of ``head(hidden)`` in chunks; logits of at most `chunk_tokens` positions exist at one time.

    A single chunk keeps its logits for backward; several are recomputed, for one more pass through the head.

    Args:
        head: f[k, H] -> logits f[k, V]
        hidden: f[K, H]
    """

    def one(hidden: Tensor, targets: Tensor, inverse_temperature: Tensor) -> tuple[Tensor, Tensor]:
        return score(head(hidden), targets, inverse_temperature, entropy_grad=entropy_grad, normalise=normalise)

    total = hidden.shape[0]
    if total <= chunk_tokens:
        return one(hidden, targets, inverse_temperature)
    parts = []
    for start in range(0, total, chunk_tokens):
        end = start + chunk_tokens
        inputs = (hidden[start:end], targets[start:end], inverse_temperature[start:end])
        parts.append(checkpoint(one, *inputs, use_reentrant=False) if torch.is_grad_enabled() else one(*inputs))
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
