"""The run directory: one owner, whole lines, nothing lost when the disk fills."""

from __future__ import annotations

import contextlib
import json
import math
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_core.errors import DataError, RunError
from miles_core.tracking.run_dir import RunDir, read_lines


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    directory = RunDir(tmp_path / "quick")
    directory.open()
    yield directory
    directory.close()


@contextlib.contextmanager
def files_at_most(size: int) -> Iterator[None]:
    """Writes beyond `size` bytes of any file fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_lines_are_whole_and_read_back_in_order(run: RunDir) -> None:
    for step in range(3):
        run.append(run.metrics, {"step": step, "train/loss": step / 3})
    assert [line["step"] for line in read_lines(run.metrics)] == [0, 1, 2]
    assert run.metrics.read_bytes().endswith(b"\n")


def test_equal_records_are_equal_bytes_whatever_the_order_of_their_keys(run: RunDir) -> None:
    run.append(run.metrics, {"step": 1, "b": 0.1, "a": 1e-7})
    run.append(run.metrics, {"a": 1e-7, "step": 1, "b": 0.1})
    first, second = run.metrics.read_bytes().splitlines()
    assert first == second


def test_nan_is_null_since_it_is_not_json(run: RunDir) -> None:
    run.append(run.metrics, {"step": 1, "x": math.nan, "y": math.inf})
    assert json.loads(run.metrics.read_text()) == {"step": 1, "x": None, "y": None}


def test_a_half_line_of_a_crash_is_passed_over_and_never_glued_to_the_next(run: RunDir) -> None:
    run.event("start")
    with run.events.open("a") as file:
        file.write('{"event": "sa')
    assert [line["event"] for line in read_lines(run.events)] == ["start"]
    run.event("stop")
    assert [line["event"] for line in read_lines(run.events)] == ["start", "stop"]


def test_a_file_that_is_one_half_line_starts_anew(run: RunDir) -> None:
    run.metrics.write_text('{"ste')
    run.append(run.metrics, {"step": 1})
    assert list(read_lines(run.metrics)) == [{"step": 1}]


@pytest.mark.parametrize("line", [b'{"step": 3, "half', b"\0\0\0", b"[1]", b'{"x": "\xff"}'])
def test_a_damaged_line_is_named_with_its_number(run: RunDir, line: bytes) -> None:
    run.append(run.metrics, {"step": 1})
    with run.metrics.open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(DataError, match=r"damaged(.|\n)*metrics.jsonl:2"):
        list(read_lines(run.metrics))


def test_resuming_drops_the_steps_that_will_be_recorded_again(run: RunDir) -> None:
    for step in range(5):
        run.append(run.metrics, {"step": step, "x": 0.1 * step})
        run.append(run.timings, {"step": step})
    before = run.metrics.read_bytes().splitlines()
    run.keep_steps_before(3)
    assert run.metrics.read_bytes().splitlines() == before[:3]
    assert [line["step"] for line in read_lines(run.timings)] == [0, 1, 2]


def test_a_full_disk_says_so_and_loses_nothing_already_written(run: RunDir) -> None:
    run.append(run.metrics, {"step": 1, "note": "x" * 100})
    stands = run.metrics.read_bytes()
    with files_at_most(len(stands) + 20), pytest.raises(RunError, match="disk is full"):
        run.append(run.metrics, {"step": 2, "note": "x" * 100})
    assert run.metrics.read_bytes() == stands
    run.append(run.metrics, {"step": 2})
    assert [line["step"] for line in read_lines(run.metrics)] == [1, 2]


def test_a_whole_file_is_replaced_or_left_alone(run: RunDir) -> None:
    run.write_text("plan.json", "old\n")
    with files_at_most(10), pytest.raises(RunError):
        run.write_text("plan.json", "x" * 100_000)
    assert (run.path / "plan.json").read_text() == "old\n"
    assert not list(run.path.glob("*.partial"))


def test_a_second_process_is_refused_and_told_who_owns_the_run(run: RunDir) -> None:
    code = (
        "import sys; from pathlib import Path; from miles_core.tracking.run_dir import RunDir\n"
        "try: RunDir(Path(sys.argv[1])).open()\n"
        "except Exception as error: print(error)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, str(run.path)], capture_output=True, text=True, timeout=240, check=True
    )
    assert "in use" in said.stdout
    assert (run.path / "LOCK").read_text().strip() in said.stdout


def test_a_directory_that_cannot_be_made_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(RunError, match="cannot write"):
        RunDir(tmp_path / "runs" / "quick").open()


def test_the_lock_ends_with_its_owner(run: RunDir) -> None:
    run.close()
    again = RunDir(run.path)
    again.open()
    again.close()


def test_an_earlier_run_is_set_aside_under_the_first_free_number(run: RunDir) -> None:
    run.write_text("run.yaml", "name: quick\n")
    run.close()
    (run.path.parent / "quick.1").mkdir()
    assert run.set_aside() == run.path.parent / "quick.2"
    assert not run.exists()
