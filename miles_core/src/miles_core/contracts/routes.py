"""Contract 2: both sides send each token to the same experts. Dense models have none, so it does not apply to them."""

from __future__ import annotations

import numpy as np

from miles_core.contracts.report import MAX_OFFENDERS, Report, Verdict
from miles_core.types import TrainBatch


def check(batch: TrainBatch, *, num_experts: int | None, replayed: bool = False) -> Report:
    """Check that the recorded experts are possible ones and cover the tokens.

    Args:
        num_experts: Experts of an MoE layer, or None for a dense model.
        replayed: The trainer was told to replay them; then routes that nobody recorded break the contract.
    """
    if num_experts is None:
        return Report(name="routes", status=Verdict.NOT_APPLICABLE)
    if batch.routes is None:
        if not replayed:
            return Report(name="routes", status=Verdict.UNAVAILABLE)
        return Report(
            name="routes",
            status=Verdict.BROKEN,
            metrics={"contract/routes/coverage": 0.0},
            offenders=("replay is on and no trajectory carries routes",),
        )
    used = np.ones(batch.num_tokens, dtype=np.bool_)
    used[batch.offsets[1:] - 1] = False  # the last token of a sequence is never an input
    routes = batch.routes.astype(np.int64)
    possible = np.all((routes >= 0) & (routes < num_experts), axis=(1, 2))
    ordered = np.sort(routes, axis=2)
    distinct = np.all(np.diff(ordered, axis=2) != 0, axis=(1, 2))
    good = possible & distinct
    broken = np.flatnonzero(used & ~good)
    sequence_ids = batch.sequence_ids
    return Report(
        name="routes",
        status=Verdict.BROKEN if broken.size else Verdict.OK,
        metrics={"contract/routes/coverage": float(good[used].mean()) if used.any() else 1.0},
        offenders=tuple(
            f"sequence {int(sequence_ids[at])}, token {int(at - batch.offsets[sequence_ids[at]])}: "
            + ("an expert twice in one layer" if possible[at] else f"an expert outside [0, {num_experts})")
            for at in broken[:MAX_OFFENDERS]
        ),
    )
