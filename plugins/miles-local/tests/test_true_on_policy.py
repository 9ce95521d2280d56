"""With the batch-invariant operators, an answer is a function of its request and the weights, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from miles_core.errors import ConfigError
from miles_core.kinds.engine import EngineContext, GenerateRequest
from miles_core.testing.engine_oracle import Answer, answers, ask, full_logprobs
from miles_core.testing.tiny import make_tiny_model
from miles_local.engine import LocalEngine
from miles_local.graphs import _inputs
from miles_local.options import LocalOptions
from miles_local.scheduler import Plan

SETTINGS: list[dict[str, Any]] = [
    {"max_batch_size": 7, "prefill_tokens": 5},
    {"max_batch_size": 1, "prefix_cache": False},
    {"max_batch_size": 3, "kv_tokens": 150, "prefill_tokens": 64},
]
"""Prompts in pieces beside decoding rows; one row at a time from scratch; with rows put back for lack of memory."""


def requests(temperature: float) -> list[GenerateRequest]:
    shared = [1, *range(40, 70)]
    prompts = [shared[: 1 + 5 * n] for n in range(7)]
    return [
        ask(prompt, name=str(n), max_tokens=6 + 4 * n, seed=n, temperature=temperature)
        for n, prompt in enumerate(prompts)
    ]


async def ask_engine(folder: Path, asked: Sequence[GenerateRequest], **options: Any) -> list[Answer]:
    context = EngineContext(model_path=str(folder), context_length=None, device="cpu", seed=0, true_on_policy=True)
    engine = LocalEngine(LocalOptions(**options), context)
    await engine.start()
    try:
        return await answers(engine, asked)
    finally:
        await engine.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_batch_prefill_pieces_and_cache_leave_no_trace(tmp_path: Path, dtype: Any) -> None:
    folder = make_tiny_model(tmp_path / dtype, architecture="qwen3", dtype=dtype)
    found = [await ask_engine(folder, requests(0.7), **settings) for settings in SETTINGS]
    for other in found[1:]:
        assert [answer.token_ids for answer in other] == [answer.token_ids for answer in found[0]]
        assert [answer.logprobs for answer in other] == [answer.logprobs for answer in found[0]]


async def test_the_log_probs_are_right(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, architecture="qwen3")
    asked = requests(1.3)[-1]
    (answer,) = await ask_engine(folder, [asked])
    row = [*asked.token_ids, *answer.token_ids]
    wanted = full_logprobs(folder, row, temperature=1.3)[len(asked.token_ids) - 1 : -1]
    wanted = wanted.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(answer.logprobs), wanted, rtol=1e-4, atol=1e-4)


async def test_a_model_without_profile_is_refused_with_the_list(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, architecture="llama")
    with pytest.raises(ConfigError, match="qwen3-4b"):
        await ask_engine(folder, requests(1.0))


def test_rows_that_fill_up_a_recorded_step_repeat_the_first() -> None:
    plan = SimpleNamespace(token_ids=(5, 6, 7), positions=(10, 33, 2), token_slots=(0, 1, 2))
    token_ids, positions, places, queries, counts, starts, kv_rows = _inputs(cast(Plan, plan), 64, 8).tolist()
    assert token_ids == [5, 6, 7, 5, 5, 5, 5, 5]
    assert positions == starts == [10, 33, 2, 10, 10, 10, 10, 10]
    assert places == [10, 64 + 33, 128 + 2, 10, 10, 10, 10, 10], "a filling row would overwrite another's key-values"
    assert kv_rows == [0, 64, 128, 0, 0, 0, 0, 0]
    assert queries == list(range(8)), "a filling row would overwrite another's output"
    assert counts == [1] * 8
