"""Correction: turns the log-ratio between trainer and rollout into a weight for each token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Correction(Protocol):
    """``(log_ratio f[N], mask bool[N], sequence_ids i64[N], **options) -> (weight f[N], metrics)``. Pure.

    `log_ratio` is the trainer's log-prob before the update minus the engine's. The weight multiplies the loss of its
    token, after any clipping; it is 1 where the mask is False and carries no gradient. Metrics are tensors f[N], whose
    means over trained tokens are reported.
    """

    def __call__(
        self, log_ratio: Tensor, mask: Tensor, sequence_ids: Tensor, /, **options: Any
    ) -> tuple[Tensor, dict[str, Tensor]]: ...
