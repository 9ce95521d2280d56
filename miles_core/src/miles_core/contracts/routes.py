"""Contract 2: both sides send each token to the same experts. Dense models have none, so it does not apply to them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from miles_core.contracts.report import MAX_OFFENDERS, Report, Verdict
from miles_core.kinds.backend import RouteCounts
from miles_core.routing.codec import recorded_rows
from miles_core.types import RouteMode, TrainBatch

MAX_DIFFERENT_FRACTION = 0.15
"""Without replay: (token, layer) pairs with another set of experts. Rounding alone flips 1 to 10 % of them, more for
many experts and low precision; a router with other weights flips most."""


def check(
    batch: TrainBatch,
    *,
    num_experts: int | None,
    mode: RouteMode = "off",
    counts: RouteCounts | None = None,
    fresh: npt.NDArray[np.bool_] | None = None,
) -> Report:
    """Check that the recorded experts are possible ones, cover the tokens, and are those the trainer used.

    Args:
        num_experts: Experts of an MoE layer, or None for a dense model.
        mode: What the run does with routes. Under replay, recorded experts that the trainer did not use break the
            contract; else only a difference beyond `MAX_DIFFERENT_FRACTION` does. Tokens without a record are counted;
            when no token has one, the run does not do what it says.
        counts: What the backend counted in its scoring pass of this batch; None when it made none. Nothing is compared
            then: the figures are reported and the verdict is unavailable.
        fresh: bool[N], tokens that the trainer's own weights sampled; None is all. A router that has learnt since picks
            other experts for old tokens, which is no fault: only under replay is a batch with any of them judged.
    """
    if num_experts is None:
        return Report(name="routes", status=Verdict.NOT_APPLICABLE)
    if mode == "off" and batch.routes is None:
        return Report(name="routes", status=Verdict.UNAVAILABLE)
    if batch.routes is None:
        return Report(
            name="routes",
            status=Verdict.BROKEN,
            metrics={"contract/routes/coverage": 0.0},
            offenders=("routes are on and no trajectory carries any",),
        )
    used = np.ones(batch.num_tokens, dtype=np.bool_)
    used[batch.offsets[1:][batch.lengths > 0] - 1] = False  # the last token of a sequence is never an input
    recorded = recorded_rows(batch.routes)
    possible, distinct = _sound(batch.routes, num_experts)
    bad = used & recorded & ~(possible & distinct)
    good = used & possible & distinct
    offenders = [_bad_row(batch, int(at), bool(possible[at]), num_experts) for at in np.flatnonzero(bad)]
    moved_on = fresh is not None and not fresh[batch.loss_mask].all()
    compared = counts is not None and counts.recorded > 0 and (mode == "replay" or not moved_on)
    differences = _differences(counts, mode) if counts is not None and compared else []
    if used.any() and not (used & recorded).any():
        differences = ["routes are on and no token's experts were recorded"]
    return Report(
        name="routes",
        status=Verdict.BROKEN if offenders or differences else Verdict.OK if compared else Verdict.UNAVAILABLE,
        metrics={
            "contract/routes/coverage": float(good[used].mean()) if used.any() else 1.0,
            "contract/routes/unrecorded_tokens": float((used & ~recorded).sum()),
            **_fractions(counts),
        },
        offenders=tuple([*differences, *offenders][:MAX_OFFENDERS]),
    )


def _sound(routes: npt.NDArray[np.integer], num_experts: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """bool[N] each: every index is an expert; no layer names one twice."""
    possible = np.all((routes >= 0) & (routes < num_experts), axis=(1, 2))
    distinct = np.all(np.diff(np.sort(routes, axis=2), axis=2) != 0, axis=(1, 2))
    return possible, distinct


def _bad_row(batch: TrainBatch, at: int, possible: bool, num_experts: int) -> str:
    sequence = int(batch.sequence_ids[at])
    problem = "an expert twice in one layer" if possible else f"an expert outside [0, {num_experts})"
    return f"sequence {sequence}, token {at - int(batch.offsets[sequence])}: {problem}"


def _fractions(counts: RouteCounts | None) -> dict[str, float]:
    if counts is None or counts.recorded == 0:
        return {}
    return {
        "contract/routes/different_fraction": counts.used_differs / counts.recorded,
        "contract/routes/own_different_fraction": counts.own_differs / counts.recorded,
    }


def _differences(counts: RouteCounts, mode: RouteMode) -> list[str]:
    fraction = counts.used_differs / counts.recorded
    if mode == "replay" and counts.used_differs:
        return [f"replay is on and {counts.used_differs} of {counts.recorded} (token, layer) pairs used other experts"]
    if fraction > MAX_DIFFERENT_FRACTION:
        return [f"{fraction:.1%} of (token, layer) pairs use other experts; {MAX_DIFFERENT_FRACTION:.0%} is allowed"]
    return []
