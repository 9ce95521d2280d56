from __future__ import annotations

import pickle
from array import array

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from miles_core.session.row import TokenIds, TokenRow
from miles_core.types import TokenSpan

PIECES = st.lists(st.tuples(st.booleans(), st.integers(0, 4), st.integers(0, 2)), max_size=8)


def build(pieces: list[tuple[bool, int, int]]) -> TokenRow:
    row = TokenRow()
    for sampled, count, version in pieces:
        ids = list(range(len(row), len(row) + count))
        if sampled:
            row.append_sampled(ids, [-float(index) for index in ids], version)
        else:
            row.append_given(ids)
    return row


@given(PIECES)
def test_spans_tile_the_sampled_tokens_and_only_those_have_log_probs(pieces: list[tuple[bool, int, int]]) -> None:
    row = build(pieces)
    ids, sampled, logprobs = row.arrays()
    assert ids.tolist() == list(range(len(row)))
    assert (np.isfinite(logprobs) == sampled).all()
    flags = [flag for flag, count, _ in pieces for _ in range(count)]
    versions = [version for _, count, version in pieces for _ in range(count)]
    assert sampled.tolist() == flags
    for span in row.spans:
        assert set(versions[span.start : span.end]) == {span.weight_version}
    for left, right in zip(row.spans, row.spans[1:], strict=False):
        assert left.end < right.start or left.weight_version != right.weight_version


@given(PIECES, st.integers(0, 32))
def test_cut_and_paste_restore_the_row(pieces: list[tuple[bool, int, int]], at: int) -> None:
    row, whole = build(pieces), build(pieces)
    tail = row.cut(min(at, len(row)))
    assert all(span.end <= len(row) and span.start < span.end for span in row.spans)
    row.paste(tail)
    assert row.spans == whole.spans
    for ours, theirs in zip(row.arrays(), whole.arrays(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_neighbours_of_one_version_are_one_span() -> None:
    row = TokenRow()
    row.append_given([1])
    row.append_sampled([2, 3], [-1.0, -1.0], 5)
    row.append_sampled([], [], 6)
    row.append_sampled([4], [-1.0], 5)
    row.append_sampled([5], [-1.0], 6)
    assert row.spans == (
        TokenSpan(start=1, end=4, weight_version=5),
        TokenSpan(start=4, end=5, weight_version=6),
    )


def test_token_ids_are_a_sequence_that_equals_any_other_and_travels() -> None:
    ids = TokenIds(array("i", [5, 6, 7]))
    assert ids == (5, 6, 7)
    assert ids == [5, 6, 7]
    assert ids != (5, 6)
    assert (list(ids), ids[-1], ids[1:]) == ([5, 6, 7], 7, TokenIds(array("i", [6, 7])))
    assert pickle.loads(pickle.dumps(ids)) == ids
    assert np.asarray(ids).dtype == np.int32
    assert len({ids, TokenIds(array("i", [5, 6, 7]))}) == 1
