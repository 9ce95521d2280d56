"""Contract 1: both sides condition on identical token ids, and agree on which of them were sampled and are trained."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miles_core.contracts.report import MAX_OFFENDERS, Report, Verdict
from miles_core.errors import ContractError
from miles_core.types import Group, Status, TrainBatch, Trajectory

MISMATCH = "tito_session_mismatch"
"""Under which a trajectory's metadata holds how its row differs from canonical rendering; see `session.mismatch`."""
MISMATCH_KINDS = ("special_token_count", "special_token_type", "non_assistant_text", "assistant_text")


def check(groups: Sequence[Group], batch: TrainBatch | None = None) -> Report:
    """Check every row of `groups` that did not fail, and that `batch`, if given, holds the trainable ones unchanged."""
    attempts = [each for group in groups for each in group.trajectories if each.status is not Status.FAILED]
    rows = [row for attempt in attempts for row in attempt.rows]
    offenders = []
    for row in rows:
        try:
            row.check()
        except ContractError as error:
            offenders.append(f"{error.where}: {error.message}")
    changed = [] if batch is None else _changed(groups, batch)
    trainable = [row for group in groups for attempt in group.trainable for row in attempt.rows]
    return Report(
        name="tokens",
        status=Verdict.BROKEN if offenders or changed else Verdict.OK,
        metrics={
            "contract/tokens/checked_trajectories": float(len(rows)),
            "contract/tokens/broken_trajectories": float(len(offenders) + len(changed)),
            "contract/tokens/sampled_tokens": float(sum(row.response_tokens for row in trainable)),
            "contract/tokens/trained_tokens": float(sum(int(row.loss_mask.sum()) for row in trainable)),
            **_mismatches(rows),
        },
        offenders=tuple([*offenders, *changed][:MAX_OFFENDERS]),
    )


def _mismatches(rows: Sequence[Trajectory]) -> dict[str, float]:
    """Rows that differ from their canonical rendering, as fractions of those compared; nothing where none was tried."""
    tried = [row.metadata[MISMATCH] for row in rows if MISMATCH in row.metadata]
    if not tried:
        return {}
    compared = [found["kinds"] for found in tried if "kinds" in found]
    uncompared = {"contract/tokens/mismatch_unknown": 1 - len(compared) / len(tried)}
    if not compared:
        return uncompared
    shares = {kind: sum(kind in kinds for kinds in compared) / len(compared) for kind in MISMATCH_KINDS}
    return {
        **uncompared,
        "contract/tokens/mismatch_rate": sum(bool(kinds) for kinds in compared) / len(compared),
        **{f"contract/tokens/mismatch/{kind}": share for kind, share in shares.items()},
    }


def _changed(groups: Sequence[Group], batch: TrainBatch) -> list[str]:
    """Rows of the batch whose ids or mask are not those that rollout produced."""
    rows = [row for group in groups for attempt in group.trainable for row in attempt.rows]
    if len(rows) != batch.num_sequences:
        return [f"the batch has {batch.num_sequences} sequences, rollout made {len(rows)}"]
    found = []
    starts = batch.offsets
    for index, row in enumerate(rows):
        here = slice(int(starts[index]), int(starts[index + 1]))
        same_ids = np.array_equal(batch.token_ids[here], row.token_ids)
        if not (same_ids and np.array_equal(batch.loss_mask[here], row.loss_mask)):
            found.append(
                f"session {row.session_id!r}: {'mask' if same_ids else 'ids'} changed on the way to the trainer"
            )
    return found
