"""Stretched models under Megatron's own rotation of our tables: packed sequences score as transformers scores each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import miles_megatron.start  # noqa: F401
from miles_core.errors import DataError
from miles_core.testing.backend_oracle import LOSS, expected_update
from miles_core.testing.rotary import CONTEXT, ROTATIONS, STEADY, long_and_short, write_rotated

from . import scenarios
from .models import write_sparse


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_log_probs_are_those_of_each_sequence_alone(tmp_path: Path, rotation: str) -> None:
    write_rotated(tmp_path / "model", rotation)
    check(tmp_path, STEADY[rotation])


PARTIAL = {"partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("name", "rope"),
    [
        ("glm4-moe", {**ROTATIONS["yarn"], **PARTIAL}),  # scales rotated dimensions alone
        ("glm4-moe", {**ROTATIONS["linear"], **PARTIAL}),
        ("deepseek-v3", {**ROTATIONS["yarn"], "mscale": 1.0, "mscale_all_dim": 0.5}),
        ("deepseek-v3", ROTATIONS["linear"]),
        ("deepseek-v3", ROTATIONS["llama3"]),
    ],
)
def test_partial_and_latent_rotations_are_those_of_transformers(tmp_path: Path, name: str, rope: Any) -> None:
    write_sparse(tmp_path / "model", name, rope_parameters=dict(rope), max_position_embeddings=CONTEXT)
    check(tmp_path, CONTEXT)


def check(folder: Path, longest: int) -> None:
    batch = long_and_short(longest)
    made = scenarios.Place(0, 1, folder, "cpu").make("model", micro_batch_tokens=4096)
    expected = expected_update(folder / "model", batch, LOSS).logprobs
    assert np.abs(made.log_probs(batch) - expected).max() < 1e-5
    with pytest.raises(DataError, match=f"at most {longest} tokens"):
        made.log_probs(long_and_short(longest + 1))
    made.close()
