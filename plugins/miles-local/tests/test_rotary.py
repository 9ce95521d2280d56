"""Decoding across the length that a stretched model was first trained on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from miles_core.errors import EngineError
from miles_core.kinds.engine import EngineContext
from miles_core.testing.engine_oracle import answers, ask, logprobs_of
from miles_core.testing.rotary import CONTEXT, ORIGINAL, ROTATIONS, STEADY, write_rotated
from miles_local.engine import LocalEngine
from miles_local.options import LocalOptions


def engine(folder: Path, context_length: int) -> LocalEngine:
    context = EngineContext(model_path=str(folder), context_length=context_length, device="cpu", seed=0)
    return LocalEngine(LocalOptions(max_batch_size=3, prefill_tokens=12), context)


@pytest.mark.parametrize("rotation", ROTATIONS)
async def test_logprobs_are_those_of_one_pass_over_the_row(tmp_path: Path, rotation: str) -> None:
    folder, longest = write_rotated(tmp_path, rotation), STEADY[rotation]
    served = engine(folder, longest)
    await served.start()
    # Rows before, across and after the original length decode in one batch, and all reach the limit.
    requests = [
        ask([*range(30, 30 + start)], name=str(start), max_tokens=longest, seed=start)
        for start in (2, longest // 2, 3, longest - 3)
    ]
    for request, answer in zip(requests, await answers(served, requests), strict=True):
        assert len(request.token_ids) + len(answer.token_ids) == longest
        expected = logprobs_of(folder, request.token_ids, answer.token_ids)
        assert torch.allclose(expected, torch.tensor(answer.logprobs), atol=1e-4)
    await served.close()


@pytest.mark.parametrize(("rotation", "longest"), [("longrope", ORIGINAL), ("dynamic", CONTEXT)])
async def test_a_context_in_which_the_table_would_change_is_refused(
    tmp_path: Path, rotation: str, longest: int
) -> None:
    with pytest.raises(EngineError, match=f"at most {longest} tokens"):
        await engine(write_rotated(tmp_path, rotation), longest + 1).start()
