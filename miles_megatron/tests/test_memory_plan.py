"""The planned memory of a rank against the peak of live tensors in a real optimizer step."""

from __future__ import annotations

from pathlib import Path

import pytest

import miles_megatron.start  # noqa: F401
from miles_core.planning.sizes import read_sizes
from miles_core.testing.live_bytes import peak_of_a_step
from miles_core.testing.tiny import make_tiny_model
from miles_megatron.backend import MegatronBackend
from miles_megatron.checkpoint_folder import Fields, open_folder
from miles_megatron.known import table_for
from miles_megatron.layouts import Heads
from miles_megatron.memory import plan
from miles_megatron.options import MegatronOptions

from .models import DENSE, SPARSE, write_models

TOKENS, CHUNK = 1024, 256

# In bfloat16 attention widens to float32 on CPU; kept for every layer, that is memory no GPU would need.
CASES = [
    ("qwen3", "float32", False, 128),
    ("qwen3", "float32", True, 128),
    ("qwen3", "bfloat16", True, 128),
    ("qwen3-moe", "float32", False, 64),
    ("llama", "float32", False, 256),
]


@pytest.mark.parametrize(("architecture", "dtype", "recompute", "hidden"), CASES)
def test_the_plan_is_within_a_tenth_of_the_measured_peak(
    tmp_path: Path, architecture: str, dtype: str, recompute: bool, hidden: int
) -> None:
    folder = make_tiny_model(
        tmp_path,
        architecture=architecture,  # type: ignore[arg-type]
        layers=4,
        hidden=hidden,
        vocab=1000,
        context=1024,
        dtype=dtype,  # type: ignore[arg-type]
    )
    options = MegatronOptions(
        recompute="full" if recompute else "none", micro_batch_tokens=TOKENS, logprob_chunk_tokens=CHUNK
    )
    measured = peak_of_a_step(lambda context: MegatronBackend(options, context), folder, TOKENS)
    planned = plan(options, read_sizes(folder), 1, False)
    assert planned.total == pytest.approx(measured, rel=0.10)


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
