"""miles serve as a process: real sockets, real signals, kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from miles_core.cli import main
from miles_core.testing.tiny import make_tiny_model

U = {"role": "user", "content": "hello"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@contextmanager
def served(*arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-u", "-m", "miles_core.cli", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    )
    assert process.stdout is not None
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("serving"):
                yield line.split(" at ")[1].strip(), process
                return
        raise AssertionError("".join(said))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def chat(url: str, key: str, *messages: object) -> httpx.Response:
    return httpx.post(f"{url}/sessions/{key}/v1/chat/completions", json={"messages": list(messages)}, timeout=60)


def test_a_killed_server_restarts_with_every_committed_session(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text('"alpha"\n"beta"\n')
    arguments = ("--model", str(model), "--engine", "scripted", "--script", str(script))
    journal = ("--journal", str(tmp_path / "journal"))
    with served(*arguments, *journal) as (url, process):
        key = httpx.post(f"{url}/sessions", timeout=60).json()["session_id"]
        assert chat(url, key, U).json()["choices"][0]["message"]["content"] == "alpha"
        before = httpx.post(f"{url}/sessions/{key}/samples", timeout=60).json()["samples"]
        process.send_signal(signal.SIGKILL)
        process.wait()
    with served(*arguments, *journal) as (url, process):
        after = httpx.post(f"{url}/sessions/{key}/samples", timeout=60).json()["samples"]
        assert after == before
        counted = httpx.get(f"{url}/metrics", timeout=60).text
        assert 'miles_tito_session_checked_total{family="chatml"} 1' in counted, counted
        answer = chat(url, key, U, {"role": "assistant", "content": "alpha"}, U)
        assert answer.status_code == 200, answer.text
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 0


@pytest.mark.slow
def test_engine_local_serves_a_checkpoint(model: Path) -> None:
    with served("--model", str(model), "--max-tokens", "6") as (url, _):
        key = httpx.post(f"{url}/sessions", json={"sampling": {"seed": 1}}, timeout=60).json()["session_id"]
        answers = [chat(url, key, U).json() for _ in range(2)]
        assert all(answer["usage"]["completion_tokens"] <= 6 for answer in answers)
        (sample,) = httpx.post(f"{url}/sessions/{key}/samples", timeout=60).json()["samples"]
        assert sample["metadata"]["discarded_turns"] == 1


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((), "RUN_FILE or --model"),
        (("run.yaml", "--model", "m"), "not both"),
        (("run.yaml", "--engine", "local"), "--engine goes with --model"),
        (("--model", "m", "--set", "a=1"), "--set overrides a RUN_FILE"),
        (("--model", "m", "--leaves", "best"), "no leaf picker"),
        (("--model", "/nowhere", "--engine", "scripted"), "/nowhere"),
    ],
)
def test_what_cannot_be_served_is_said_before_anything_starts(arguments: tuple[str, ...], word: str) -> None:
    done = CliRunner().invoke(main, ["serve", *arguments])
    assert done.exit_code == (1 if word == "/nowhere" else 2)
    assert word in done.output


@pytest.mark.slow
def test_a_run_file_says_what_is_served(model: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"model: {model}\nsession: {{history: branching}}\nplacement: {{device: cpu}}\n")
    with served(str(tmp_path / "run.yaml"), "--max-tokens", "4", "--model-name", "policy") as (url, _):
        assert httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"] == "policy"
        key = httpx.post(f"{url}/sessions", timeout=60).json()["session_id"]
        assert [chat(url, key, U).status_code for _ in range(2)] == [200, 200]
        assert httpx.get(f"{url}/sessions/{key}", timeout=60).json()["leaves"] == [0, 1]
