"""Which version a step's log-probs are judged by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from miles_core import batching
from miles_core.contracts.report import Verdict
from miles_core.driver.run import Run
from miles_core.driver.stages import check_contracts
from miles_core.rollout.scheduler import Collected
from miles_core.tracking.live import verdict_text
from miles_core.types import Group, Prompt, Status, TokenSpan, Trajectory


def group(version: int) -> Group:
    sampled = np.array([False, True, True])
    row = Trajectory(
        prompt_id="p",
        session_id="s",
        token_ids=np.array([1, 2, 3], dtype=np.int32),
        sampled=sampled,
        loss_mask=sampled,
        logprobs=np.array([np.nan, -1.0, -1.0], dtype=np.float32),
        spans=(TokenSpan(start=1, end=3, weight_version=version),),
        temperature=1.0,
        status=Status.COMPLETED,
        reward=1.0,
    )
    return Group(prompt=Prompt(id="p", messages=()), trajectories=(row,))


@pytest.mark.parametrize(
    ("published_step", "verdict", "fresh"), [(5, Verdict.BROKEN, 1.0), (3, Verdict.UNAVAILABLE, 0.0)]
)
def test_between_two_publishes_no_token_is_of_the_trainers_own_version(
    published_step: int, verdict: Verdict, fresh: float
) -> None:
    """Version 2 is published; after step 5 the trainer holds its weights only when they are those of step 5."""
    run = SimpleNamespace(
        spec=SimpleNamespace(
            objective=SimpleNamespace(old_logprobs="trainer"),
            rollout=SimpleNamespace(routes="off"),
            precision=SimpleNamespace(true_on_policy=False),
            schedule=SimpleNamespace(on_weight_update="retract"),
            weights=SimpleNamespace(verify="off", probes=int(published_step == 5)),
        ),
        num_experts=None,
        published_step=published_step,
        trained_step=5,
    )
    groups = (group(2),)
    batch = batching.with_old_logprobs(batching.pack(groups), np.full(3, -2.0, dtype=np.float32))
    reports: Any = check_contracts(
        cast(Run, run),
        cast(Collected, SimpleNamespace(groups=groups)),
        batch,
        version=2,
        max_staleness=None,
        counts=None,
    )
    by_name = {report.name: report for report in reports}
    assert by_name["logprobs"].status is verdict
    assert by_name["logprobs"].metrics["contract/logprobs/fresh_fraction"] == fresh
    assert by_name["versions"].status is Verdict.OK
    assert by_name["versions"].metrics["contract/versions/proven"] == (published_step == 5)
    assert ("not proven" in verdict_text(by_name["versions"])) is (published_step != 5)
    assert by_name["versions"].metrics["contract/versions/s_old_max"] == 0, "age counts published versions"
