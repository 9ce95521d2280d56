"""Reduction weights against loops over sequences."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.algorithms.reductions import REDUCTIONS, token_weights
from miles_core.errors import RunError


def naive_loss(losses: list[list[float]], masks: list[list[int]], mode: str, length: int) -> float:
    """The reduction in the words of the papers: sums and means over sequences."""
    rows = [[x for x, m in zip(row, mask, strict=True) if m] for row, mask in zip(losses, masks, strict=True)]
    rows = [row for row in rows if row]
    if mode == "token-mean":
        return sum(sum(row) for row in rows) / sum(len(row) for row in rows)
    per_sequence = {
        "sequence-mean-token-sum": [sum(row) for row in rows],
        "sequence-mean-token-mean": [sum(row) / len(row) for row in rows],
        "fixed-length": [sum(row) / length for row in rows],
    }[mode]
    return sum(per_sequence) / len(per_sequence)


@pytest.mark.parametrize("mode", REDUCTIONS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_weighted_sum_is_the_reduction(mode: str, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    masks = [data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)) for n in lengths]
    masks[0][0] = 1
    losses = [data.draw(st.lists(st.floats(-9, 9), min_size=n, max_size=n)) for n in lengths]
    ids = np.repeat(np.arange(len(lengths)), lengths)
    mask = np.array([bool(m) for row in masks for m in row])
    weights = token_weights(mask, ids, mode, fixed_length_tokens=7)
    found = float((weights * np.array([x for row in losses for x in row])).sum())
    assert found == pytest.approx(naive_loss(losses, masks, mode, 7), abs=1e-9)
    assert (weights[~mask] == 0).all()


def test_sequences_without_a_trained_token_do_not_count() -> None:
    mask, ids = np.array([True, False, False]), np.array([0, 1, 1])
    assert token_weights(mask, ids, "sequence-mean-token-mean").tolist() == [1.0, 0.0, 0.0]


def test_fixed_length_weighs_short_and_long_sequences_alike() -> None:
    mask, ids = np.ones(4, dtype=np.bool_), np.array([0, 1, 1, 1])
    assert token_weights(mask, ids, "fixed-length", fixed_length_tokens=10).tolist() == pytest.approx([0.05] * 4)


def test_an_update_without_trained_tokens_is_an_error() -> None:
    with pytest.raises(RunError, match="trains no token"):
        token_weights(np.zeros(3, dtype=np.bool_), np.zeros(3, dtype=np.int64), "token-mean")


def test_fixed_length_without_a_length_and_unknown_modes_are_errors() -> None:
    mask, ids = np.ones(1, dtype=np.bool_), np.zeros(1, dtype=np.int64)
    with pytest.raises(RunError, match="no length"):
        token_weights(mask, ids, "fixed-length")
    with pytest.raises(RunError, match="unknown reduction"):
        token_weights(mask, ids, "mean-of-means")
