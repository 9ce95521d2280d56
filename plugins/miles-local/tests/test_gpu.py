"""On an NVIDIA GPU: the tokens and log-probs of the CPU."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from miles_core.kinds.engine import EngineContext, GenerateRequest
from miles_core.testing.engine_oracle import answers, ask
from miles_core.testing.tiny import make_tiny_model
from miles_core.types import SamplingParams
from miles_local.engine import LocalEngine
from miles_local.options import LocalOptions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


async def generate(model: Path, device: str) -> list[tuple[list[int], list[float]]]:
    engine = LocalEngine(
        LocalOptions(), EngineContext(model_path=str(model), context_length=None, device=device, seed=0)
    )
    await engine.start()

    async def one(number: int) -> tuple[list[int], list[float]]:
        request = GenerateRequest(
            request_id=str(number),
            session_id=str(number),
            token_ids=(1, *range(5, 6 + number)),
            params=SamplingParams(max_tokens=4 + 3 * number, seed=number),
        )
        chunks = [chunk async for chunk in engine.generate(request)]
        return [i for c in chunks for i in c.token_ids], [lp for c in chunks for lp in c.logprobs]

    try:
        return list(await asyncio.gather(*(one(number) for number in range(6))))
    finally:
        await engine.close()


async def test_sampled_tokens_and_log_probs_are_those_of_the_cpu(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", seed=0)
    on_gpu, on_cpu = await generate(model, "cuda:0"), await generate(model, "cpu")
    for (ids, logprobs), (expected_ids, expected_logprobs) in zip(on_gpu, on_cpu, strict=True):
        assert ids == expected_ids
        np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-3)


async def test_true_on_policy_log_probs_do_not_depend_on_the_batch_that_a_graph_decodes(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", architecture="qwen3", dtype="bfloat16")
    found = []
    for rows in (1, 3, 11):
        context = EngineContext(
            model_path=str(model), context_length=None, device="cuda:0", seed=0, true_on_policy=True
        )
        engine = LocalEngine(LocalOptions(max_batch_size=rows, prefill_tokens=32), context)
        await engine.start()
        requests = [ask([1, *range(5, 6 + 7 * n)], name=str(n), max_tokens=20 + 30 * n, seed=n) for n in range(6)]
        found.append([(answer.token_ids, answer.logprobs) for answer in await answers(engine, requests)])
        await engine.close()
    assert found[0] == found[1] == found[2]
