"""`miles serve` over a real server: the official OpenAI SDK talks to a session, which keeps what was sampled."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from miles_core.session.serving.records import unpacked
from miles_core.testing.engine_oracle import logprobs_of, make_models

pytestmark = pytest.mark.sglang
BOOT_S = 600.0
MODEL = Path(__file__).parents[3] / "models" / "smollm2-135m"


@contextmanager
def serving(run_file: Path, *, max_tokens: int = 12) -> Iterator[str]:
    """The address of `miles serve`, from the moment it says so."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-u",
            "-m",
            "miles_core.cli",
            "serve",
            "--port=0",
            f"--max-tokens={max_tokens}",
            str(run_file),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert process.stdout is not None
    said: list[str] = []
    address: queue.Queue[str | None] = queue.Queue()
    output = process.stdout

    def read() -> None:
        for line in output:
            said.append(line)
            if line.startswith("serving"):
                address.put(line.split(" at ")[1].strip())
        address.put(None)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        url = address.get(timeout=BOOT_S)
        assert url is not None, "".join(said)[-3000:]
        yield url
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()
            reader.join(30)
            output.close()


def run_file(folder: Path, model: Path, engine: dict[str, Any]) -> Path:
    (folder / "reward.py").write_text("def score(scored):\n    return 0.0\n")
    (folder / "train.jsonl").write_text(json.dumps({"prompt": "hello"}) + "\n")
    run = {
        "name": "serve",
        "model": str(model),
        "data": {"train": str(folder / "train.jsonl")},
        "rewards": [f"{folder / 'reward.py'}:score"],
        "rollout": {"sampling": {"max_tokens": 12}},
        "schedule": {"steps": 1},
        "placement": {"device": "cpu"},
        "tracking": {"dir": str(folder / "runs")},
        "engine": {"use": "sglang", **engine},
    }
    (folder / "run.yaml").write_text(json.dumps(run))
    return folder / "run.yaml"


def test_the_openai_sdk_gets_a_turn_whose_tokens_are_kept(
    seeded: Any, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    openai = pytest.importorskip("openai")
    model = make_models(tmp_path_factory.getbasetemp()).served
    engine = {"urls": [seeded.url], "dtype": "float32", "deterministic": True}
    with serving(run_file(tmp_path, model, engine)) as url:
        key = httpx.post(f"{url}/sessions", json={}, timeout=60).json()["session_id"]
        client = openai.OpenAI(base_url=f"{url}/sessions/{key}/v1", api_key="none", max_retries=0, timeout=120)
        answer = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hello"}])
        (sample,) = httpx.post(f"{url}/sessions/{key}/samples", timeout=60).json()["samples"]
    ids, mask, logprobs = (unpacked(sample[name]) for name in ("token_ids", "sampled", "logprobs"))
    at = np.flatnonzero(mask)
    assert answer.usage.completion_tokens == len(at) > 0, "the session kept other tokens than it sampled"
    start = int(at[0])
    expected = logprobs_of(model, ids[:start].tolist(), ids[start : at[-1] + 1].tolist())
    np.testing.assert_allclose(logprobs[start : at[-1] + 1], expected, atol=1e-4)


@pytest.mark.slow
def test_a_real_model_streams_two_turns_and_both_are_kept(cpu_options: dict[str, object], tmp_path: Path) -> None:
    """SmolLM2 ends its first turn by itself; the second one's prompt is the first turn's tokens and what follows."""
    openai = pytest.importorskip("openai")
    if not (MODEL / "config.json").exists():
        pytest.skip("models/smollm2-135m is not there; make quickstart creates it")
    with serving(run_file(tmp_path, MODEL, {**cpu_options, "stream_interval": 1}), max_tokens=200) as url:
        body = {"sampling": {"temperature": 0.0}}
        key = httpx.post(f"{url}/sessions", json=body, timeout=60).json()["session_id"]
        client = openai.OpenAI(base_url=f"{url}/sessions/{key}/v1", api_key="none", max_retries=0, timeout=300)
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        pieces: list[list[str]] = []
        for _ in range(2):
            said, reason = [], None
            for chunk in client.chat.completions.create(model="policy", messages=messages, stream=True):
                said += [choice.delta.content for choice in chunk.choices if choice.delta.content]
                reason = next((choice.finish_reason for choice in chunk.choices if choice.finish_reason), reason)
            assert reason == "stop", "".join(said)
            pieces.append(said)
            messages += [
                {"role": "assistant", "content": "".join(said)},
                {"role": "user", "content": "Say that again in one short sentence."},
            ]
        (sample,) = httpx.post(f"{url}/sessions/{key}/samples", timeout=60).json()["samples"]
    assert all(len(said) > 3 for said in pieces), "the answers came whole, not as a stream"
    ids, mask, logprobs = (unpacked(sample[name]) for name in ("token_ids", "sampled", "logprobs"))
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    text = tokenizer.decode(ids)
    for said in pieces:
        assert "".join(said) in text
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
    assert len(edges) == 4, "two stretches were sampled"
    reference = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(torch.tensor(ids[None].astype(np.int64))).logits[0].log_softmax(-1)
    at = np.flatnonzero(mask)
    np.testing.assert_allclose(logprobs[at], expected[at - 1, ids[at]].numpy(), atol=1e-3)
