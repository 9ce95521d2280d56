"""Every conformance kit catches the wrong implementations kept for it, each by the tests it names and by no other.

A file in `faults/` is a kind. Its classes subclass the kit with an implementation that is wrong in one plausible way,
and say in `caught_by` which tests must fail and with which words:

    class TestForgetsOldSteps(TrackerConformance):
        caught_by = {"test_a_resumed_tracker_keeps_earlier_steps": "step 0"}

All of them run in one pytest of their own, since what should fail cannot run in the suite itself.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FAULTS = [path for path in sorted((HERE / "faults").glob("[a-z]*.py")) if "caught_by" in path.read_text()]
"""Kits of function kinds keep their wrong functions in the same folder and need no classes around them."""

Failures = dict[str, dict[str, str]]
"""Class ("file::Class") to test to message."""


HEAVY = {"architecture", "backend", "engine"}
"""Kits that load models: every day only the tests that must fail are run, under `-m slow` all of them."""

LIGHT = [path for path in FAULTS if path.stem not in HEAVY]


def test_every_planted_fault_is_caught_by_the_tests_that_name_it(tmp_path: Path) -> None:
    check(LIGHT, [str(path) for path in LIGHT], tmp_path)


@pytest.mark.parametrize("file", [path for path in FAULTS if path.stem in HEAVY], ids=lambda path: path.stem)
def test_every_planted_fault_of_a_model_is_caught(tmp_path: Path, file: Path) -> None:
    named = [f"{file}::{name}::{test}" for name, caught_by in expectations(file).items() for test in caught_by]
    check([file], named, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("file", [path for path in FAULTS if path.stem in HEAVY], ids=lambda path: path.stem)
def test_no_other_test_fails_on_a_planted_fault_of_a_model(tmp_path: Path, file: Path) -> None:
    check([file], [str(file)], tmp_path)


def check(files: list[Path], targets: list[str], tmp_path: Path) -> None:
    found, ran = run_faults(targets, tmp_path)
    problems = mismatches(files, found, ran)
    assert not problems, "\n".join(problems)


def run_faults(targets: list[str], tmp_path: Path) -> tuple[Failures, set[str]]:
    """Failures of each fault class, and the classes that ran at all."""
    report = tmp_path / "report.xml"
    # Output is captured by the file, and one thread per process keeps the machine free for the suite around it.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-o",
        "python_files=*/kits/faults/*.py",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    # What fails leaves files open and tasks behind; here that is not the point. Nor are tracebacks, and parsing source
    # for them while an engine's thread parses too is a SystemError in CPython 3.11.
    command += ["--tb=no", "--assert=plain", "-p", "no:unraisableexception", "-p", "no:threadexception"]
    command += [f"--junitxml={report}", *targets]
    done = subprocess.run(
        command,
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert report.exists(), done.stdout + done.stderr
    failures: Failures = defaultdict(dict)
    ran = set()
    for case in ElementTree.parse(report).iter("testcase"):
        *_, file, name = case.get("classname", "").split(".")
        ran.add(f"{file}::{name}")
        for outcome in (*case.iter("failure"), *case.iter("error")):
            test = case.get("name", "").partition("[")[0]
            message = failures[f"{file}::{name}"].get(test, "")
            failures[f"{file}::{name}"][test] = f"{message}{outcome.get('message')}\n{outcome.text}"
    return failures, ran


def mismatches(files: list[Path], found: Failures, ran: set[str]) -> list[str]:
    """What is not as the fault classes say, one line each."""
    problems = []
    for file in files:
        for name, caught_by in expectations(file).items():
            where = f"{file.stem}::{name}"
            failed = found.get(where, {})
            if where not in ran:
                problems.append(f"{where} did not run")
            problems += [
                f"{where}: {test} passed although it should catch this" for test in caught_by.keys() - failed.keys()
            ]
            problems += [f"{where}: {test} also failed: {failed[test]}" for test in failed.keys() - caught_by.keys()]
            problems += [
                f"{where}: {test} failed for another reason than {words!r}: {failed[test]}"
                for test, words in caught_by.items()
                if test in failed and words not in failed[test]
            ]
    return problems


def expectations(file: Path) -> dict[str, dict[str, str]]:
    """`caught_by` of every fault class of a file."""
    spec = importlib.util.spec_from_file_location(f"planted_faults_{file.stem}", file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    classes = {
        name: value for name, value in vars(module).items() if name.startswith("Test") and isinstance(value, type)
    }
    assert classes, f"{file} has no fault"
    for name, value in classes.items():
        assert getattr(value, "caught_by", None), f"{file.stem}::{name} does not say by what it is caught"
    return {name: value.caught_by for name, value in classes.items()}


@pytest.mark.parametrize(
    ("failed", "ran", "problem"),
    [
        ({"x::TestA": {"test_one": "boom"}}, {"x::TestA"}, None),
        ({}, {"x::TestA"}, "passed although it should catch this"),
        ({"x::TestA": {"test_one": "boom", "test_two": "bang"}}, {"x::TestA"}, "test_two also failed"),
        ({"x::TestA": {"test_one": "bang"}}, {"x::TestA"}, "failed for another reason"),
        ({"x::TestA": {"test_one": "boom"}}, set(), "did not run"),
    ],
)
def test_the_comparison_itself_notices_each_difference(tmp_path: Path, failed, ran, problem) -> None:
    file = tmp_path / "x.py"
    file.write_text("class TestA:\n    caught_by = {'test_one': 'boom'}\n")
    found = mismatches([file], failed, ran)
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]
