"""Contract 4: the worked examples, and what the report makes of several groups."""

from __future__ import annotations

import numpy as np
import pytest

from miles_core.contracts import versions
from miles_core.contracts.report import Verdict
from miles_core.types import Group, Prompt, Status, TokenSpan, Trajectory


def row(*spans: tuple[int, int]) -> Trajectory:
    """A trajectory of ``(tokens, version)`` spans behind one prompt token."""
    made, start = [], 1
    for tokens, version in spans:
        made.append(TokenSpan(start=start, end=start + tokens, weight_version=version))
        start += tokens
    sampled = np.arange(start) >= 1
    return Trajectory(
        prompt_id="p",
        session_id="s",
        token_ids=np.zeros(start, dtype=np.int32),
        sampled=sampled,
        loss_mask=sampled,
        logprobs=np.where(sampled, -1.0, np.nan).astype(np.float32),
        spans=tuple(made),
        temperature=1.0,
        status=Status.COMPLETED,
        reward=0.0,
    )


def group(*rows: Trajectory, name: str = "p") -> Group:
    return Group(prompt=Prompt(id=name, messages=()), trajectories=rows)


def test_tokens_of_versions_12_and_13_consumed_at_14() -> None:
    age = versions.group_staleness(group(row((5, 12), (5, 13))), 14)
    assert age is not None
    assert (age.s_old, age.s_post, age.delta_gen) == (2, 1, 1)


def test_300_tokens_of_version_12_and_100_of_13_have_mean_version_12_25() -> None:
    age = versions.group_staleness(group(row((300, 12), (100, 13))), 14)
    assert age is not None
    assert 14 - age.token_weighted == 12.25
    assert age.token_weighted == 1.75


def test_the_oldest_token_of_any_trajectory_ages_the_group() -> None:
    age = versions.group_staleness(group(row((1, 9)), row((3, 11))), 12)
    assert age is not None
    assert (age.s_old, age.s_post, age.delta_gen) == (3, 1, 2)


def test_the_report_averages_groups_and_weighs_tokens() -> None:
    report = versions.check([group(row((300, 12), (100, 13))), group(row((400, 14)))], current_version=14)
    assert report.status is Verdict.OK
    assert report.metrics == pytest.approx(
        {
            "contract/versions/sample_coverage": 1.0,
            "contract/versions/token_coverage": 1.0,
            "contract/versions/mixed_fraction": 0.5,
            "contract/versions/proven": 1.0,
            "contract/versions/current": 14,
            "contract/versions/s_old_mean": 1.0,
            "contract/versions/s_old_max": 2,
            "contract/versions/s_post_mean": 0.5,
            "contract/versions/delta_gen_mean": 0.5,
            "contract/versions/delta_gen_max": 1,
            "contract/versions/token_staleness": 1.75 / 2,
        }
    )


def test_a_limit_rejects_only_what_is_strictly_older() -> None:
    groups = [group(row((5, 12), (5, 13)), name="old one")]
    assert versions.check(groups, current_version=14, max_staleness=2).status is Verdict.OK
    report = versions.check(groups, current_version=14, max_staleness=1)
    assert report.status is Verdict.BROKEN
    assert report.offenders == ("prompt 'old one': 2 versions old, 1 allowed",)


def test_a_version_nobody_published_is_broken() -> None:
    report = versions.check([group(row((5, 15)))], current_version=14)
    assert report.status is Verdict.BROKEN
    assert "15 was never published" in report.offenders[0]


def test_spans_without_provenance_lower_the_coverage_and_nothing_else() -> None:
    report = versions.check([group(row((5, -1), (5, 13)), row((5, -1)))], current_version=14, max_staleness=1)
    assert report.status is Verdict.OK
    assert report.metrics["contract/versions/sample_coverage"] == 0.5
    assert report.metrics["contract/versions/s_old_max"] == 1


def test_a_group_without_any_version_is_never_stale() -> None:
    report = versions.check([group(row((5, -1)))], current_version=14, max_staleness=0)
    assert report.status is Verdict.UNAVAILABLE
    assert set(report.metrics.values()) == {0.0}
    assert "contract/versions/s_old_max" not in report.metrics


def test_the_coverage_counts_tokens_beside_trajectories() -> None:
    report = versions.check([group(row((3, -1), (1, 9)), row((4, -1)))], current_version=9)
    assert report.metrics["contract/versions/sample_coverage"] == 0.5
    assert report.metrics["contract/versions/token_coverage"] == 1 / 8
    assert report.metrics["contract/versions/mixed_fraction"] == 0
