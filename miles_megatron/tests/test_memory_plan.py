"""The planned memory of a rank against the peak of live tensors in a real optimizer step."""

from __future__ import annotations

from pathlib import Path

import pytest

import miles_megatron.start  # noqa: F401
from miles_core.planning.sizes import read_sizes
from miles_core.testing.live_bytes import CASES, Case, peak_of_a_step
from miles_megatron.backend import MegatronBackend
from miles_megatron.checkpoint_folder import Fields, open_folder
from miles_megatron.known import table_for
from miles_megatron.layouts import Heads
from miles_megatron.memory import plan
from miles_megatron.options import MegatronOptions

from . import scenarios
from .models import DENSE, SPARSE, write_models


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_plan_is_within_a_tenth_of_the_measured_peak(tmp_path: Path, case: Case) -> None:
    folder = case.write(tmp_path)
    options = scenarios.memory_options(recompute=case.recompute)
    measured = peak_of_a_step(lambda context: MegatronBackend(options, context), folder)
    assert plan(options, read_sizes(folder), 1, False).total == pytest.approx(measured, rel=0.10)


@pytest.mark.parametrize("name", [*DENSE, *SPARSE])
def test_weights_are_those_that_the_tables_give_a_tensor_parallel_rank(tmp_path: Path, name: str) -> None:
    folder = open_folder(str(write_models(tmp_path, name) / name))
    table, shape = table_for(folder), table_for(folder).architecture.describe(Fields(folder.config))
    pieces = {piece for tensor in folder.tensors if (piece := table.find(tensor))}
    held = 0
    for piece in pieces:
        row = table.rows[piece.row]
        parts = [folder.tensors[tensor] for tensor in table.tensors(piece)]
        if row.trained:
            split = row.layout.split(parts, 2, Heads(shape.heads, shape.key_value_heads, shape.vocab))
            held += split[0].numel()
    options = MegatronOptions(tensor_parallel=2, sequence_parallel=True, expert_tensor_parallel=2)
    assert plan(options, read_sizes(folder.path), 2, False).of("weights") == 4 * held
