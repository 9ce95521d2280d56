"""Reductions: the weight each token's loss has in the whole update. Numpy; evaluated in the driver, before any split.

The loss of an update is ``sum(weights * per_token_loss)`` over all micro-batches of all ranks. The denominators are
those of the whole update and are known before it starts, so a plain sum of partial sums is the one-batch loss,
whatever the split.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from miles_core.errors import RunError

Reduction = Literal["token-mean", "sequence-mean-token-sum", "sequence-mean-token-mean", "fixed-length"]
REDUCTIONS: tuple[str, ...] = get_args(Reduction)


def token_weights(
    mask: npt.NDArray[np.bool_],
    sequence_ids: npt.NDArray[np.int64],
    mode: str,
    *,
    fixed_length_tokens: int | None = None,
) -> npt.NDArray[np.float64]:
    """Weight of each token, 0 outside the mask.

    With n trained tokens in all, S sequences that have some, and n_s of them in the token's own sequence:

        token-mean                1 / n
        sequence-mean-token-sum   1 / S
        sequence-mean-token-mean  1 / (S n_s)
        fixed-length              1 / (S L), with L = `fixed_length_tokens` (Dr. GRPO, arXiv:2503.20783)

    Args:
        mask: bool[N] trained tokens of the update.
        sequence_ids: i64[N] sequence of each token.
        mode: One of `REDUCTIONS`.
        fixed_length_tokens: L of `fixed-length`; required there, unused elsewhere.
    Returns:
        f64[N]
    Raises:
        RunError: no token is trained, the mode is unknown, or `fixed-length` lacks its length.
    """
    trained = int(mask.sum())
    if not trained:
        raise RunError(
            "the update trains no token",
            expected="at least one token with loss_mask",
            found=f"{mask.shape[0]} tokens, none trained",
            do="look at the rollouts of this step: every completion is empty or masked",
        )
    _, index = np.unique(sequence_ids, return_inverse=True)
    per_sequence = np.bincount(index, weights=mask)
    sequences = int((per_sequence > 0).sum())
    if mode == "token-mean":
        weights = np.full(mask.shape, 1.0 / trained)
    elif mode == "sequence-mean-token-sum":
        weights = np.full(mask.shape, 1.0 / sequences)
    elif mode == "sequence-mean-token-mean":
        weights = 1.0 / (sequences * np.maximum(per_sequence, 1)[index])
    elif mode == "fixed-length" and fixed_length_tokens:
        weights = np.full(mask.shape, 1.0 / (sequences * fixed_length_tokens))
    elif mode == "fixed-length":
        raise RunError(
            "reduction `fixed-length` has no length",
            expected="tokens per sequence, at least 1",
            found=repr(fixed_length_tokens),
            where="objective.fixed_length_tokens",
            do="set it, or rollout.sampling.max_tokens",
        )
    else:
        raise RunError(
            f"unknown reduction {mode!r}", expected="one of " + ", ".join(REDUCTIONS), where="objective.reduction"
        )
    return np.where(mask, weights, 0.0)
