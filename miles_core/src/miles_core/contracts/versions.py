"""Contract 4: every sampled token knows which weights made it, and how far the trainer has moved on since.

With v_min and v_max the oldest and newest version that sampled a token of a group, and v_c the published version at the
moment the trainer consumes it: ``S_old = v_c - v_min`` (the conservative age, used for filtering), ``S_post = v_c -
v_max`` (age gained after generation), ``delta_gen = v_max - v_min`` (updates that landed while it was generated). The
unit is a published version, not an optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from miles_core.contracts.report import MAX_OFFENDERS, Report, Verdict
from miles_core.types import Group, TokenSpan, TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """Age of a set of sampled tokens, in published versions.

    Example:
        300 tokens of version 12 and 100 of version 13, consumed at version 14, are
        Staleness(s_old=2, s_post=1, delta_gen=1, token_weighted=1.75, tokens=400)
    """

    s_old: int
    s_post: int
    delta_gen: int
    token_weighted: float
    """v_c minus the token-weighted mean version"""
    tokens: int


def staleness(spans: Iterable[TokenSpan], current_version: int) -> Staleness | None:
    """Age of the spans' tokens. Spans without provenance (negative version) are left out; None when no span has any."""
    known = [span for span in spans if span.weight_version >= 0]
    if not known:
        return None
    oldest = min(span.weight_version for span in known)
    newest = max(span.weight_version for span in known)
    tokens = sum(span.end - span.start for span in known)
    lag = sum((current_version - span.weight_version) * (span.end - span.start) for span in known)
    return Staleness(
        s_old=current_version - oldest,
        s_post=current_version - newest,
        delta_gen=newest - oldest,
        token_weighted=lag / tokens,
        tokens=tokens,
    )


def group_staleness(group: Group, current_version: int) -> Staleness | None:
    """Age of a group: over all sampled tokens of its trainable trajectories."""
    rows = (row for attempt in group.trainable for row in attempt.rows)
    return staleness((span for row in rows for span in row.spans), current_version)


def fresh_tokens(batch: TrainBatch, version: int, *, mixed_keys: bool = False) -> npt.NDArray[np.bool_]:
    """bool[N]: tokens that weight version `version` sampled.

    Args:
        mixed_keys: Requests go on over the key-values of older weights (in-place updates). No single version gives the
            log-probs of what is sampled then, so that rows of several versions have no fresh token.
    """
    fresh: npt.NDArray[np.bool_] = batch.versions == version
    if mixed_keys:
        other = (batch.versions >= 0) & ~fresh
        fresh &= ~np.isin(batch.sequence_ids, np.unique(batch.sequence_ids[other]))
    return fresh


def check(
    groups: Sequence[Group], *, current_version: int, max_staleness: int | None = None, proven: bool = True
) -> Report:
    """Measure the age of `groups` when the trainer consumes them.

    Args:
        proven: Whether updates compare what the engines serve with what the trainer has. Without it the versions are
            what engines and their servers say; that is no breach, and the report says so.

    Broken when a token claims a version that was never published, or a group's S_old is strictly over `max_staleness`.
    """
    rows = [row for group in groups for attempt in group.trainable for row in attempt.rows]
    if not rows:
        return Report(name="versions", status=Verdict.UNAVAILABLE)
    versioned = sum(any(span.weight_version >= 0 for span in row.spans) for row in rows)
    ages = [(group, age) for group in groups if (age := group_staleness(group, current_version)) is not None]
    spans = [span for row in rows for span in row.spans]
    sampled = sum(span.end - span.start for span in spans)
    known = sum(span.end - span.start for span in spans if span.weight_version >= 0)
    mixed = sum(len({span.weight_version for span in row.spans if span.weight_version >= 0}) > 1 for row in rows)
    coverage = {
        "contract/versions/sample_coverage": versioned / len(rows),
        "contract/versions/token_coverage": known / sampled if sampled else 0.0,
        "contract/versions/mixed_fraction": mixed / len(rows),
    }
    if not ages:
        return Report(name="versions", status=Verdict.UNAVAILABLE, metrics=coverage)
    offenders = []
    for group, age in sorted(ages, key=lambda pair: -abs(pair[1].s_old)):
        if age.s_post < 0:
            offenders.append(f"prompt {group.prompt.id!r}: version {current_version - age.s_post} was never published")
        elif max_staleness is not None and age.s_old > max_staleness:
            offenders.append(f"prompt {group.prompt.id!r}: {age.s_old} versions old, {max_staleness} allowed")
    tokens = sum(age.tokens for _, age in ages)
    number = len(ages)
    return Report(
        name="versions",
        status=Verdict.BROKEN if offenders else Verdict.OK,
        metrics={
            **coverage,
            "contract/versions/proven": float(proven),
            "contract/versions/current": float(current_version),
            "contract/versions/s_old_mean": sum(age.s_old for _, age in ages) / number,
            "contract/versions/s_old_max": float(max(age.s_old for _, age in ages)),
            "contract/versions/s_post_mean": sum(age.s_post for _, age in ages) / number,
            "contract/versions/delta_gen_mean": sum(age.delta_gen for _, age in ages) / number,
            "contract/versions/delta_gen_max": float(max(age.delta_gen for _, age in ages)),
            "contract/versions/token_staleness": sum(age.token_weighted * age.tokens for _, age in ages) / tokens,
        },
        offenders=tuple(offenders[:MAX_OFFENDERS]),
    )
