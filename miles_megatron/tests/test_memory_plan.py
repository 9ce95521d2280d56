"""The planned memory of a rank against the peak of live tensors in a real optimizer step."""

from __future__ import annotations

from pathlib import Path

import pytest

import miles_megatron.start  # noqa: F401
from miles_core.planning.memory import Layout, Work, megatron
from miles_core.planning.sizes import read_sizes
from miles_core.testing.live_bytes import peak_of_a_step
from miles_core.testing.tiny import make_tiny_model
from miles_megatron.backend import MegatronBackend
from miles_megatron.options import MegatronOptions

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
    work = Work(
        micro_batch_tokens=TOKENS,
        recompute=recompute,
        logits_chunk_tokens=CHUNK,
        precision=dtype,  # type: ignore[arg-type]
    )
    options = MegatronOptions(
        recompute="full" if recompute else "none", micro_batch_tokens=TOKENS, logprob_chunk_tokens=CHUNK
    )
    measured = peak_of_a_step(lambda context: MegatronBackend(options, context), folder, TOKENS)
    planned = megatron(read_sizes(folder), Layout(gpus=1), work)
    assert planned.total == pytest.approx(measured, rel=0.10)
