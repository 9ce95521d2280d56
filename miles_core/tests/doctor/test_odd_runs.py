"""Runs that were cut short, resumed, or written sparsely: the doctor stays right, or says what it cannot know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from miles_core.doctor.diagnosis import diagnose
from miles_core.errors import DataError
from miles_core.report.load import load_run
from miles_core.tracking.run_dir import RunDir

from .test_signs import Array, broken, drift, error, noise, verdict, write_run

MEAN = "contract/logprobs/abs_diff_mean_fresh"


def forget(directory: RunDir, *steps: int) -> None:
    for step in steps:
        (directory.rollouts / f"step_{step:06d}.parquet").unlink()


def write_metrics(directory: RunDir, *lines: dict[str, Any]) -> None:
    directory.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_broken_contract_is_never_passed_over_for_want_of_rollouts(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", noise(0.4))
    write_metrics(directory, *({"step": step, MEAN: 0.4 if step > 2 else 0.01} for step in range(1, 6)))
    directory.event(**broken(3, "logprobs", "sequence 0: mean |difference| 0.4 nats"))
    forget(directory, 1, 2, 3, 4, 5)
    assert verdict(tmp_path / "run") == ("logprobs", "unexplained", 3)


def test_a_difference_that_came_late_is_reported_though_the_first_steps_are_unknown(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", drift(0.05, from_step=4))
    forget(directory, 1, 2)
    directory.event(**broken(4, "logprobs", "sequence 0: mean |difference| 0.16 nats"))
    assert verdict(tmp_path / "run") == ("logprobs", "unexplained", 4)


def test_stale_weights_are_blamed_by_the_first_steps_metrics_where_its_rollouts_were_not_written(
    tmp_path: Path,
) -> None:
    directory = write_run(tmp_path / "run", drift(0.1))
    lines = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    write_metrics(directory, {**lines[0], MEAN: 1e-6}, *({**line, MEAN: 0.1 * line["step"]} for line in lines[1:]))
    forget(directory, 1, 2)
    assert verdict(tmp_path / "run") == ("versions", "weights not delivered", 3)


def test_a_policy_that_sharpened_beside_stale_weights_is_no_temperature(tmp_path: Path) -> None:
    def engine(step: int, true: Array) -> Array:
        return true if step == 1 else (1 - 0.06 * step) * true - 0.3

    write_run(tmp_path / "run", engine)
    assert verdict(tmp_path / "run") == ("versions", "weights not delivered", 2)


def test_labels_of_a_version_that_the_trainer_has_left_are_not_fresh(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", drift(0.05), mode="one-step-off")
    lines = [
        {"step": s, "contract/versions/current": s - 1, "contract/logprobs/fresh_fraction": float(s == 1)}
        for s in range(1, 6)
    ]
    write_metrics(directory, *lines)
    assert verdict(tmp_path / "run") is None


def test_a_step_that_left_no_metrics_is_judged_in_synchronous_runs_alone(tmp_path: Path) -> None:
    for mode, expected in (("sync", ("versions", "weights not delivered", 2)), ("fully-async", None)):
        directory = write_run(tmp_path / mode, drift(0.05), steps=2, mode=mode)
        write_metrics(directory, {"step": 1, "contract/versions/current": 0})
        assert verdict(tmp_path / mode) == expected


def test_what_a_resumption_undid_is_not_held_against_the_run(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", noise(1e-6))
    directory.event(**broken(3, "tokens", "session 's': ids changed"))
    directory.event(**error("ContractError", "the engines do not serve version 3 as the trainer has it"))
    assert len(diagnose(load_run(tmp_path / "run")).findings) == 2
    directory.event("resume", step=2, checkpoint="step_000002")
    assert verdict(tmp_path / "run") is None
    directory.event(**broken(4, "tokens", "session 's': ids changed"))
    directory.event("resume", step=4, checkpoint="step_000004")
    assert verdict(tmp_path / "run") == ("tokens", "rows changed", 4)


def test_rollouts_of_an_earlier_life_are_left_out(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", drift(0.05, from_step=4))
    write_metrics(directory, *({"step": step, "contract/versions/current": step - 1} for step in (1, 2)))
    assert verdict(tmp_path / "run") is None


@pytest.mark.parametrize(
    ("message", "contract"),
    [
        ("tokens contract: token 3 is trained but was not sampled", "tokens"),
        ("version contract: tokens were sampled before any weights were published", "versions"),
        ("routes contract: the recorded routes are not of this model", "routes"),
        ("`old_logprobs` is not finite at a trained token", "logprobs"),
        ("weights after publishing version 0 are not the trainer's", "versions"),
    ],
)
def test_a_contract_that_ended_the_run_is_a_finding(message: str, contract: str, tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", noise(1e-6), steps=2)
    directory.event(**error("ContractError", message + "\n  found:    x\n  do:       y"))
    assert verdict(tmp_path / "run") == (contract, "stopped the run", 3)


def test_replay_that_was_not_obeyed_says_nothing_of_the_records(tmp_path: Path) -> None:
    metrics = {"contract/routes/own_different_fraction": 0.02, "contract/routes/different_fraction": 0.01}
    directory = write_run(tmp_path / "run", noise(1e-6), metrics=metrics, settings={"rollout": {"routes": "replay"}})
    offender = "replay is on and 5 of 100 (token, layer) pairs used other experts"
    directory.event(**broken(1, "routes", offender))
    assert verdict(tmp_path / "run") == ("routes", "replay not obeyed", 1)


def test_damaged_files_are_named_and_the_others_read(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", drift(0.05))
    (directory.rollouts / "step_000004.parquet").write_bytes(b"")
    diagnosis = diagnose(load_run(tmp_path / "run"))
    assert [finding.cause for finding in diagnosis.findings] == ["weights not delivered"]
    assert any("steps 4: the files are damaged" in line for line in diagnosis.blind)
    (tmp_path / "run" / "env.json").write_text('{"a":')
    with pytest.raises(DataError, match="damaged"):
        load_run(tmp_path / "run")
