"""Broken engines in real runs, named by the doctor; the whole set is `benchmarks/planted_faults.py`."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")
IN_CI = ("re-tokenized prompt", "stale weights", "wrong version label", "float32")


def cases() -> Any:
    sys.path.insert(0, BENCHMARKS)
    try:
        return importlib.import_module("planted_faults")
    finally:
        sys.path.remove(BENCHMARKS)


planted = cases()


def check(name: str, folder: Path) -> None:
    case = planted.CASES[name]
    diagnosis = planted.examine(case, folder)
    found = [(finding.contract, finding.cause) for finding in diagnosis.findings]
    assert found == ([(case.contract, case.cause)] if case.contract else [])


@pytest.mark.parametrize("name", IN_CI)
def test_the_doctor_names_the_contract(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


def test_a_run_that_the_proof_of_an_update_stopped_is_read_alike(tmp_path: Path) -> None:
    diagnosis = planted.examine(replace(planted.FAULTS["dropped layer update"], proved=True), tmp_path)
    assert [(finding.contract, finding.cause) for finding in diagnosis.findings] == [
        ("versions", "weights not delivered")
    ]
    assert "layers.1." in diagnosis.findings[0].evidence[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in planted.CASES if name not in IN_CI])
def test_the_doctor_names_the_contract_of_the_others(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


def test_eight_faults_and_twelve_healthy_runs_are_planted() -> None:
    assert (len(planted.FAULTS), len(planted.HEALTHY)) == (8, 12)
