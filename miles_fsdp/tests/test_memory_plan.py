"""The planned memory of a rank against the peak of live tensors in a real optimizer step."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_core.planning.sizes import read_sizes
from miles_core.testing.live_bytes import peak_of_a_step
from miles_core.testing.tiny import make_tiny_model
from miles_fsdp.backend import FsdpBackend
from miles_fsdp.memory import plan
from miles_fsdp.options import FsdpOptions

TOKENS, CHUNK = 1024, 256

CASES = [
    ("qwen3", "float32", False, 128),
    ("qwen3", "float32", True, 128),
    ("qwen3", "bfloat16", False, 128),
    ("qwen3", "bfloat16", True, 128),
    ("qwen3-moe", "float32", False, 64),
    ("llama", "bfloat16", False, 256),
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
    options = FsdpOptions(gradient_checkpointing=recompute, micro_batch_tokens=TOKENS, logprob_chunk_tokens=CHUNK)
    measured = peak_of_a_step(lambda context: FsdpBackend(options, context), folder, TOKENS)
    assert plan(options, read_sizes(folder), 1, False).total == pytest.approx(measured, rel=0.10)
