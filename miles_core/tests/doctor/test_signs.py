"""Each sign on made-up runs: it fires on its own fault, and on no other."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from miles_core import batching
from miles_core.cli import main
from miles_core.doctor.diagnosis import diagnose
from miles_core.report.load import load_run
from miles_core.tracking import rollouts
from miles_core.tracking.run_dir import RunDir
from miles_core.types import Group, Prompt, Status, TokenSpan, Trajectory

PROMPT, ANSWER, ROWS = 4, 12, 6
Array = np.ndarray[Any, np.dtype[np.float64]]
Side = Callable[[int, Array], Array]
"""(step, true log-probs [ROWS, ANSWER]) -> what one side says they are."""


def noise(size: float) -> Side:
    return lambda step, true: true + size * np.random.default_rng(step).standard_normal(true.shape)


def write_run(
    folder: Path,
    engine: Side,
    *,
    steps: int = 5,
    cached: Callable[[int, int], int] = lambda step, row: 0,
    lag: int = 0,
    mode: str = "sync",
    metrics: dict[str, float] | None = None,
    settings: dict[str, Any] | None = None,
) -> RunDir:
    """A run whose trainer says the truth and whose engine says `engine` of it."""
    directory = RunDir(folder)
    directory.open()
    config = {"name": "made-up", "model": {"path": "/gone"}, "schedule": {"mode": mode}, "rollout": {"routes": "off"}}
    directory.write_text("run.yaml", json.dumps({**config, **(settings or {})}))
    for step in range(1, steps + 1):
        true = -np.random.default_rng(100 + step).gamma(2.0, 1.0, (ROWS, ANSWER)) - 1.0
        said = np.minimum(engine(step, true), 0.0)
        group = Group(
            prompt=Prompt(id="p", messages=()),
            trajectories=tuple(row(said[i], step - 1 - lag, cached(step, i)) for i in range(ROWS)),
        )
        batch = batching.pack([group])
        old = np.zeros(batch.num_tokens, dtype=np.float32)
        old[batch.loss_mask] = true.reshape(-1)
        rollouts.write(directory.rollouts, step, [group], batching.with_old_logprobs(batch, old))
        directory.append(directory.metrics, {"step": step, "contract/versions/current": step - 1, **(metrics or {})})
    directory.close()
    return directory


def row(logprobs: Array, version: int, cached: int) -> Trajectory:
    sampled = np.arange(PROMPT + ANSWER) >= PROMPT
    values = np.full(PROMPT + ANSWER, np.nan, dtype=np.float32)
    values[PROMPT:] = logprobs
    return Trajectory(
        prompt_id="p",
        session_id="s",
        token_ids=np.arange(PROMPT + ANSWER, dtype=np.int32),
        sampled=sampled,
        loss_mask=sampled,
        logprobs=values,
        spans=(TokenSpan(start=PROMPT, end=PROMPT + ANSWER, weight_version=max(version, 0)),),
        temperature=1.0,
        status=Status.COMPLETED,
        reward=0.0,
        metadata={"cached_tokens": cached},
    )


def verdict(folder: Path) -> tuple[str, str, int] | None:
    findings = diagnose(load_run(folder)).findings
    assert len(findings) <= 1
    return (findings[0].contract, findings[0].cause, findings[0].since) if findings else None


def shift(by: int) -> Side:
    return lambda step, true: np.roll(true, by, axis=1)


def drift(rate: float, *, from_step: int = 2) -> Side:
    return lambda step, true: noise(rate * step if step >= from_step else 1e-6)(step, true)


FAULTS: dict[str, tuple[Side, tuple[str, str, int]]] = {
    "one late": (shift(1), ("logprobs", "shifted log-probs", 1)),
    "one early": (shift(-1), ("logprobs", "shifted log-probs", 1)),
    "colder": (lambda step, true: 1.4 * true + 0.9, ("logprobs", "temperature", 1)),
    "hotter": (lambda step, true: 0.6 * true - 1.0, ("logprobs", "temperature", 1)),
    "weights since step 2": (drift(0.05), ("versions", "weights not delivered", 2)),
    "weights since step 4": (drift(0.02, from_step=4), ("versions", "weights not delivered", 4)),
    "other numerics": (noise(0.4), ("logprobs", "numerics", 1)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_first_step(name: str, tmp_path: Path) -> None:
    engine, expected = FAULTS[name]
    write_run(tmp_path / "run", engine)
    assert verdict(tmp_path / "run") == expected


@pytest.mark.parametrize("size", [0.0, 1e-6, 5e-3, 0.03])
def test_rounding_of_any_precision_is_healthy(size: float, tmp_path: Path) -> None:
    write_run(tmp_path / "run", noise(size))
    assert verdict(tmp_path / "run") is None


def test_rounding_that_grows_with_the_logits_is_healthy(tmp_path: Path) -> None:
    write_run(tmp_path / "run", lambda step, true: noise(0.004 * step)(step, true))
    assert verdict(tmp_path / "run") is None


def test_a_cache_that_outlived_its_weights_is_told_from_weights_that_never_came(tmp_path: Path) -> None:
    write_run(tmp_path / "warm", drift(0.05), cached=lambda step, row: PROMPT if step > 1 or row else 0)
    write_run(tmp_path / "cold", drift(0.05), cached=lambda step, row: PROMPT if row else 0)
    assert verdict(tmp_path / "warm") == ("versions", "cache outlived its weights", 2)
    assert verdict(tmp_path / "cold") == ("versions", "weights not delivered", 2)


def test_a_warm_cache_with_right_log_probs_is_healthy(tmp_path: Path) -> None:
    write_run(tmp_path / "run", noise(1e-6), cached=lambda step, row: PROMPT)
    assert verdict(tmp_path / "run") is None


def test_age_is_no_fault_of_the_log_probs(tmp_path: Path) -> None:
    write_run(tmp_path / "run", drift(0.05), lag=1, mode="async")
    assert verdict(tmp_path / "run") is None


@pytest.mark.parametrize(("largest", "broken"), [(0.0, False), (1e-6, True)])
def test_a_promise_of_equality_is_broken_by_any_difference(largest: float, broken: bool, tmp_path: Path) -> None:
    metrics = {"contract/logprobs/abs_diff_max_fresh": largest}
    write_run(tmp_path / "run", noise(1e-7), metrics=metrics, settings={"precision": {"true_on_policy": True}})
    assert verdict(tmp_path / "run") == (("logprobs", "true-on-policy not kept", 1) if broken else None)


def test_without_the_first_steps_rollouts_nothing_is_said_of_delivery(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", drift(0.05))
    (directory.rollouts / "step_000001.parquet").unlink()
    diagnosis = diagnose(load_run(tmp_path / "run"))
    assert diagnosis.healthy
    assert any("first step's rollouts are gone" in line for line in diagnosis.blind)


@pytest.mark.parametrize(
    ("routes", "own", "used", "cause"),
    [
        ("record", 0.6, 0.6, "router differs"),
        ("record", 0.05, 0.05, None),
        ("replay", 0.6, 0.0, "router differs"),
        ("replay", 0.05, 0.01, "replay not obeyed"),
        ("replay", 0.05, 0.0, None),
    ],
)
def test_experts(routes: str, own: float, used: float, cause: str | None, tmp_path: Path) -> None:
    metrics = {"contract/routes/own_different_fraction": own, "contract/routes/different_fraction": used}
    write_run(tmp_path / "run", noise(0.01), metrics=metrics, settings={"rollout": {"routes": routes}})
    assert verdict(tmp_path / "run") == (None if cause is None else ("routes", cause, 1))


def test_a_router_that_has_learnt_since_is_no_fault(tmp_path: Path) -> None:
    metrics = {"contract/routes/own_different_fraction": 0.6, "contract/logprobs/fresh_fraction": 0.0}
    write_run(tmp_path / "run", noise(0.01), metrics=metrics, settings={"rollout": {"routes": "record"}})
    assert verdict(tmp_path / "run") is None


def error(kind: str, message: str) -> dict[str, Any]:
    return {"kind": "error", "type": kind, "message": message}


def broken(step: int, contract: str, offender: str) -> dict[str, Any]:
    return {"kind": "contract_broken", "step": step, "contract": contract, "offenders": [offender]}


TENSORS = "the engines do not serve version 3 as the trainer has it\n  found:    engine 0: 1 differs"
SAMPLES = "the engines do not sample with version 2 as the trainer scores it"
EVENTS: dict[str, tuple[dict[str, Any], tuple[str, str, int] | None]] = {
    "proof of tensors": (error("ContractError", TENSORS), ("versions", "weights not delivered", 3)),
    "proof of samples": (error("ContractError", SAMPLES), ("versions", "cache outlived its weights", 2)),
    "unknown version": (
        broken(4, "versions", "prompt 'p': version 9 was never published"),
        ("versions", "wrong version label", 4),
    ),
    "old version": (broken(4, "versions", "prompt 'p': 5 versions old, 2 allowed"), ("versions", "too old", 4)),
    "changed rows": (broken(2, "tokens", "session 's': ids changed"), ("tokens", "rows changed", 2)),
    "impossible experts": (broken(2, "routes", "token 1: an expert twice"), ("routes", "bad records", 2)),
    "another error": (error("RunError", "the disk is full"), None),
}


@pytest.mark.parametrize("name", EVENTS)
def test_what_the_run_said_itself(name: str, tmp_path: Path) -> None:
    event, expected = EVENTS[name]
    directory = write_run(tmp_path / "run", noise(1e-6))
    directory.event(**event)
    assert verdict(tmp_path / "run") == expected


def test_the_command_says_it_in_words_and_in_json_and_by_its_exit_code(tmp_path: Path) -> None:
    write_run(tmp_path / "ill", drift(0.05))
    write_run(tmp_path / "well", noise(1e-6))
    ill = CliRunner().invoke(main, ["doctor", str(tmp_path / "ill")])
    assert re.match(r"Read \d+ of \d+ steps\.", ill.output)
    assert ill.exit_code == 1
    assert "versions: broken since step 2 (weights not delivered)" in ill.output
    assert "try       set weights.verify: always" in ill.output
    well = CliRunner().invoke(main, ["doctor", str(tmp_path / "well"), "--json"])
    assert well.exit_code == 0
    assert json.loads(well.output)["findings"] == []
    none = CliRunner().invoke(main, ["doctor", str(tmp_path)])
    assert none.exit_code != 0
    assert "no run directory" in none.output


def test_a_run_without_a_step_is_not_called_broken(tmp_path: Path) -> None:
    write_run(tmp_path / "run", noise(0.0), steps=0)
    diagnosis = diagnose(load_run(tmp_path / "run"))
    assert diagnosis.healthy
    assert "no step was recorded" in diagnosis.blind
