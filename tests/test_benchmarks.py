"""Benchmarks that reach into transports still run: their figures are for people, but a script that fails has none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize("what", ["broadcast", "cuda-ipc", "delta"])
def test_every_comparison_of_transports_prints_a_ratio(what: str) -> None:
    command = [sys.executable, str(BENCHMARKS / "transports.py"), what, "--mib=8", "--bucket-mib=4", "--repeats=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "ratio" in line]
    assert len(lines) == (4 if what == "delta" else 1)
