"""Contract 1 on rows and on the batch made of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from miles_core import batching
from miles_core.contracts import tokens
from miles_core.contracts.report import Verdict
from miles_core.types import Boundary, Failure, Group, Prompt, Status, TokenSpan, Trajectory


def row(**changes: Any) -> Trajectory:
    sampled = np.array([False, True, True])
    made = Trajectory(
        prompt_id="p",
        session_id="s1",
        token_ids=np.array([1, 2, 3], dtype=np.int32),
        sampled=sampled,
        loss_mask=sampled,
        logprobs=np.array([np.nan, -1, -2], dtype=np.float32),
        spans=(TokenSpan(start=1, end=3, weight_version=0),),
        temperature=1.0,
        status=Status.COMPLETED,
        reward=0.0,
    )
    return replace(made, **changes)


def group(*rows: Trajectory) -> Group:
    return Group(prompt=Prompt(id="p", messages=()), trajectories=rows)


def test_sound_rows_are_counted() -> None:
    groups = [group(row(), row(loss_mask=np.array([False, False, True])))]
    report = tokens.check(groups, batching.pack(groups))
    assert report.status is Verdict.OK
    assert report.metrics == {
        "contract/tokens/checked_trajectories": 2,
        "contract/tokens/broken_trajectories": 0,
        "contract/tokens/sampled_tokens": 4,
        "contract/tokens/trained_tokens": 3,
    }


def test_a_broken_row_is_an_offender_by_name() -> None:
    report = tokens.check(
        [group(row(), row(session_id="bad", logprobs=np.array([np.nan, np.nan, -1], dtype=np.float32)))]
    )
    assert report.status is Verdict.BROKEN
    assert report.metrics["contract/tokens/broken_trajectories"] == 1
    assert "'bad'" in report.offenders[0]
    assert "token 1" in report.offenders[0]


def test_rows_that_failed_are_not_judged() -> None:
    failed = row(
        status=Status.FAILED,
        failure=Failure(boundary=Boundary.ENGINE, message="gone"),
        logprobs=np.zeros(0, dtype=np.float32),
    )
    assert tokens.check([group(row(), failed)]).status is Verdict.OK


def test_ids_or_masks_changed_on_the_way_to_the_trainer_are_found() -> None:
    groups = [group(row(), row(session_id="s2"))]
    batch = batching.pack(groups)
    ids = batch.token_ids.copy()
    ids[4] += 1
    report = tokens.check(groups, replace(batch, token_ids=ids))
    assert report.status is Verdict.BROKEN
    assert report.offenders == ("session 's2': ids changed on the way to the trainer",)
    mask = batch.loss_mask.copy()
    mask[1] = False
    assert "mask changed" in tokens.check(groups, replace(batch, loss_mask=mask)).offenders[0]
    assert tokens.check(groups, batch.select([0])).status is Verdict.BROKEN
