"""Schulman's estimators of KL(policy || reference) from sampled tokens, and where each may act.

With ``d = log policy - log reference`` and tokens sampled from the policy (joschu.net/blog/kl-approx.html):

    k1 = d              Unbiased value. As a loss its gradient is ``grad log policy``, whose mean is 0: no KL signal.
                        In the reward it is exact: the policy gradient of ``-k1`` is that of ``-KL``.
    k2 = d^2 / 2        Biased value. As a loss its gradient ``d grad log policy`` is that of KL(policy || reference).
    k3 = e^-d - 1 + d   Unbiased, never negative. As a loss its mean gradient is that of KL(reference || policy),
                        which pulls the policy over the reference's support. In the reward: of no divergence.

The means hold for on-policy tokens. Within an update of several optimizer steps they hold up to the change of the
policy.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Nats. e^20 = 4.9e8 is finite in float32 and beyond any ratio one would train on; there k3's gradient is 0."""


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``log policy - log reference``. f[N], f[N] -> f[N]; may be negative at a token."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``(log policy - log reference)^2 / 2``. f[N], f[N] -> f[N]."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``e^-d - 1 + d``. f[N], f[N] -> f[N]; finite for every finite input, exactly 0 at d = 0.

    `d` is clamped as a whole: clamping the exponential alone would leave ``+d``, whose gradient has the wrong sign.
    """
    d = (logprobs - ref_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(-d) + d


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""By the name a run-file uses in ``objective.kl_estimator``."""


def estimate(name: str, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The estimator `name` at each token. f[N], f[N] -> f[N]."""
    return ESTIMATORS[name](logprobs, ref_logprobs)
