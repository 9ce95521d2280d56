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

from miles_core.session.serving.records import unpacked
from miles_core.testing.engine_oracle import logprobs_of, make_models

pytestmark = pytest.mark.sglang
BOOT_S = 600.0


@contextmanager
def serving(run_file: Path) -> Iterator[str]:
    """The address of `miles serve`, from the moment it says so."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "miles_core.cli", "serve", "--port", "0", "--max-tokens", "12", str(run_file)],
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


def test_the_openai_sdk_gets_a_turn_whose_tokens_are_kept(
    seeded: Any, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    openai = pytest.importorskip("openai")
    model = make_models(tmp_path_factory.getbasetemp()).served
    (tmp_path / "reward.py").write_text("def score(scored):\n    return 0.0\n")
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "hello"}) + "\n")
    run = {
        "name": "serve",
        "model": str(model),
        "data": {"train": str(tmp_path / "train.jsonl")},
        "rewards": [f"{tmp_path / 'reward.py'}:score"],
        "rollout": {"sampling": {"max_tokens": 12}},
        "schedule": {"steps": 1},
        "placement": {"device": "cpu"},
        "tracking": {"dir": str(tmp_path / "runs")},
        "engine": {"use": "sglang", "urls": [seeded.url], "dtype": "float32", "deterministic": True},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    with serving(tmp_path / "run.yaml") as url:
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
