"""The planned memory of a rank against the peak of live tensors in a real optimizer step."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_core.planning.sizes import read_sizes
from miles_core.testing.live_bytes import CASES, CHUNK, TOKENS, Case, peak_of_a_step
from miles_fsdp.backend import FsdpBackend
from miles_fsdp.memory import plan
from miles_fsdp.options import FsdpOptions


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_plan_is_within_a_tenth_of_the_measured_peak(tmp_path: Path, case: Case) -> None:
    folder = case.write(tmp_path)
    options = FsdpOptions(gradient_checkpointing=case.recompute, micro_batch_tokens=TOKENS, logprob_chunk_tokens=CHUNK)
    measured = peak_of_a_step(lambda context: FsdpBackend(options, context), folder)
    assert plan(options, read_sizes(folder), 1, False).total == pytest.approx(measured, rel=0.10)
