"""Correction: the train/rollout log-ratio to per-token weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Correction(Protocol):
    """``(log_ratio f[N], mask bool[N], sequence_ids i64[N], **options) -> (weight f[N], metrics)``.

    `log_ratio` is trainer pre-update minus rollout log-prob. The weight multiplies the per-token loss after any
    clipping,
    is 1 outside the mask and carries no gradient. Metrics are per-token tensors f[N]; the caller means them over the
    mask.
    """

    def __call__(
        self, log_ratio: Tensor, mask: Tensor, sequence_ids: Tensor, /, **options: Any
    ) -> tuple[Tensor, dict[str, Tensor]]: ...
