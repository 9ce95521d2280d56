"""The transfer plan, for every number of sources, engines and ranks."""

from __future__ import annotations

from collections import Counter
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_transports.p2p.assignment import Target, assign


def targets(engines: int, ranks: int) -> list[Target]:
    return [Target(engine, rank) for engine in range(engines) for rank in range(ranks)]


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 8))
def test_every_target_has_one_source_and_no_source_more_sessions_than_it_must(
    sources: int, engines: int, ranks: int
) -> None:
    wanted = targets(engines, ranks)
    plan = assign(sources, wanted)
    assert len(plan) == sources
    assert Counter(target for served in plan for target in served) == Counter(wanted)
    assert max(len(served) for served in plan) == ceil(len(wanted) / sources)


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 8))
def test_the_first_pairs_are_one_to_one(sources: int, engines: int, ranks: int) -> None:
    wanted = targets(engines, ranks)
    plan = assign(sources, wanted)
    for source, target in zip(range(sources), wanted, strict=False):
        assert target in plan[source]


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 8))
def test_targets_of_one_layout_follow_each_other(sources: int, engines: int, ranks: int) -> None:
    for served in assign(sources, targets(engines, ranks)):
        assert list(served) == sorted(served, key=lambda target: (target.rank, target.engine))


def test_a_source_keeps_to_one_layout_where_it_can() -> None:
    # Four sources, four engines of four ranks: each source serves one rank of all engines.
    for source, served in enumerate(assign(4, targets(4, 4))):
        assert {target.rank for target in served} == {source}


def test_two_sources_and_three_engines() -> None:
    assert assign(2, targets(3, 1)) == ((Target(0), Target(2)), (Target(1),))


@pytest.mark.parametrize(("sources", "wanted"), [(0, targets(1, 1)), (1, [Target(0), Target(0)])])
def test_nonsense_is_refused(sources: int, wanted: list[Target]) -> None:
    with pytest.raises(ValueError, match=r"source|twice"):
        assign(sources, wanted)
