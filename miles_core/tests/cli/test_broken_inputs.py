"""What a user can hand to a command by mistake: a message and an exit code, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from miles_core.cli import main

BROKEN: dict[str, bytes | None] = {
    "folder": None,
    "empty": b"",
    "truncated": b'{"name": "x", "model": {"path": "m", "a": [1, 2',
    "zero bytes": b"\0\0\0\0",
    "not text": b"\xff\xfe\x00{}",
    "a number": b"3\n",
    "a list": b"[1, 2, {}]\n",
    "a text": b'"text"\n',
    "wrong types": b'{"step": "x", "event": 3, "name": [1], "model": 7, "schedule": "often", "data": {"train": {}}}\n',
    "more wrong types": b'{"step": {}, "event": [], "name": {}, "model": {"path": []}, "schedule": {"steps": []}}\n',
    "huge": b'{"step": 1e999, "name": "x", "model": "m", "seed": 1'
    + b"0" * 5000
    + b', "schedule": {"steps": 1e400}}\n',
    "deep": b"[" * 1000 + b"\n",
    "not finite": b'{"step": NaN, "event": "stop", "loss": Infinity, "schedule": {"steps": NaN}}\n',
}
RUN_FILES = ["validate", "train --dry-run", "serve", "convert m out --run"]
RUN_FOLDERS = ["inspect", "doctor", "report", "inspect --step 1"]
ODD_NAMES = ["nosuch", "späte läufe/no such.yaml", "x" * 300, "a\nb", "-"]


def _put(path: Path, content: bytes | None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    return path


def _run(command: str, *arguments: object) -> Result:
    result = CliRunner().invoke(main, [*command.split(), *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.output.strip()
    return result


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("suffix", ["yaml", "toml"])
def test_a_broken_run_file_is_a_list_of_problems(tmp_path: Path, broken: str, suffix: str) -> None:
    place = _put(tmp_path / "mein lauf" / f"ünïcode.{suffix}", BROKEN[broken])
    # All read it by one function; what that makes of an empty one goes furthest.
    for command in RUN_FILES if broken in ("empty", "folder") else RUN_FILES[:1]:
        assert _run(command, place).exit_code == 2, command
    assert broken != "empty" or _run("bench transports", place).exit_code == 1


@pytest.mark.parametrize("name", ODD_NAMES)
def test_what_is_not_there_is_said(name: str) -> None:
    for command in (*RUN_FILES, *RUN_FOLDERS, "convert", "plan memory", "plan sync --model", "delta inspect"):
        more = ["out"] if command == "convert" else []
        assert _run(command, name, *more).exit_code != 0, command


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_config_json_is_named(tmp_path: Path, broken: str) -> None:
    _put(tmp_path / "m" / "config.json", BROKEN[broken])
    for command in ("plan memory m", "plan sync --model m"):
        result = _run(command)
        assert (result.exit_code, "config.json" in result.output) == (2, True), command
    _put(tmp_path / "run.yaml", b"name: x\nmodel: m\nschedule: {steps: 1}\n")
    assert "config.json" in _run("validate run.yaml").output


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "nosuch"},
        {"model_type": "llama", "num_attention_heads": 0},
        {"model_type": "llama", "hidden_size": 2**70},
        {"model_type": "llama", "num_hidden_layers": 10**12},
        {"model_type": "llama", "vocab_size": -1},
        {"model_type": "llama", "torch_dtype": "float8"},
        {"model_type": ["llama"]},
        {"model_type": "llama", "auto_map": {"AutoConfig": "code.Config"}, "vocab_size": "many"},
    ],
)
def test_a_config_json_that_describes_no_model_is_named(tmp_path: Path, config: dict[str, object]) -> None:
    _put(tmp_path / "m" / "config.json", json.dumps({"architectures": ["LlamaForCausalLM"], **config}).encode())
    result = _run("plan memory m")
    assert (result.exit_code, "config.json" in result.output) == (2, True)


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_weight_file_is_named(tmp_path: Path, broken: str) -> None:
    _put(tmp_path / "m" / "config.json", b'{"hidden_size": 8}')
    _put(tmp_path / "m" / "model.safetensors", BROKEN[broken])
    for command in ("plan memory m", "plan sync --model m"):
        assert "model.safetensors" in _run(command).output, command
    assert _run("delta verify m --base", "m").exit_code != 0


@pytest.mark.parametrize(
    "name", ["run.yaml", "metrics.jsonl", "timings.jsonl", "events.jsonl", "evals.jsonl", "env.json"]
)
@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_file_of_a_run_is_a_message(tmp_path: Path, broken: str, name: str) -> None:
    run = tmp_path / "run"
    _put(run / "run.yaml", b"name: x\nschedule: {steps: 1}\n")
    _put(run / "metrics.jsonl", b'{"step": 1, "loss": 0.5}\n')
    if (run / name).exists():
        (run / name).unlink()
    _put(run / name, BROKEN[broken])
    for command in (*RUN_FOLDERS, "convert"):
        _run(command, run, *(["out"] if command == "convert" else []))


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_rollout_file_is_a_message(tmp_path: Path, broken: str) -> None:
    _put(tmp_path / "run" / "run.yaml", b"name: x\n")
    _put(tmp_path / "run" / "metrics.jsonl", b'{"step": 1}\n')
    _put(tmp_path / "run" / "rollouts" / "step_000001.parquet", BROKEN[broken])
    assert _run("inspect run").exit_code != 0
    for command in RUN_FOLDERS:
        _run(command, "run")
