"""Packed sequences of a stretched model score as each does alone, up to where its rotary table would change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from miles_core.errors import DataError
from miles_core.testing.backend_oracle import LOSS, expected_update
from miles_core.testing.rotary import ORIGINAL, ROTATIONS, STEADY, long_and_short, write_rotated

from . import ranks


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_log_probs_are_those_of_each_sequence_alone(tmp_path: Path, rotation: str) -> None:
    folder = write_rotated(tmp_path / "model", rotation)
    batch = long_and_short(STEADY[rotation])
    made = ranks.backend(tmp_path, 0, 1, micro_batch_tokens=4096)
    assert np.abs(made.log_probs(batch) - expected_update(folder, batch, LOSS).logprobs).max() < 1e-6
    with pytest.raises(DataError, match=f"at most {STEADY[rotation]} tokens"):
        made.log_probs(long_and_short(STEADY[rotation] + 1))
    made.close()


def test_a_longer_neighbour_would_have_changed_what_longrope_scores(tmp_path: Path) -> None:
    """Why it is refused: transformers takes the other table for all rows of a batch."""
    folder = write_rotated(tmp_path / "model", "longrope")
    short, long = long_and_short(ORIGINAL), long_and_short(ORIGINAL + 1)
    made = ranks.backend(tmp_path, 0, 1, micro_batch_tokens=4096)
    made._max_positions = None
    wrong = made.log_probs(long) - expected_update(folder, long, LOSS).logprobs
    assert np.abs(wrong).max() > 0.01
    assert np.abs(made.log_probs(short) - expected_update(folder, short, LOSS).logprobs).max() < 1e-6
    made.close()
