"""The run directory: who owns it, what is in it, and lines that are whole or absent.

run.yaml          resolved, every default written out        env.json    versions and machine
run.source.yaml   as given, with its overrides               plan.json   who runs where
LOCK              held while a process runs here             logs/       one file a process
metrics.jsonl     one object a step; a function of run-file and seed, compared bit for bit
timings.jsonl     one object a step; everything the wall clock decides
evals.jsonl       one object a late evaluation, under the step whose weights it measured
events.jsonl      start, resume, publish, save, eval, alarm, stop
rollouts/step_000012.parquet    checkpoints/step_000012/    report.html
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from miles_core.errors import DataError, RunError


class RunDir:
    """An opened run directory. One process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: TextIO | None = None

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def timings(self) -> Path:
        return self.path / "timings.jsonl"

    @property
    def evals(self) -> Path:
        return self.path / "evals.jsonl"

    @property
    def snapshots(self) -> Path:
        return self.path / "snapshots"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    # --- ownership ----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Create what is missing and take the lock.

        Raises:
            RunError: another process runs here, or the directory cannot be written.
        """
        try:
            for folder in (self.path, self.checkpoints, self.rollouts, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
            lock = (self.path / "LOCK").open("a+")
        except OSError as error:
            raise write_error(self.path, error) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            lock.close()
            raise RunError(
                "this run directory is in use",
                found=f"process {owner} holds its LOCK",
                where=str(self.path),
                do="wait for it, stop it, or give this run another name",
            ) from error
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        self._lock = lock

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()  # releases the flock
            self._lock = None

    def exists(self) -> bool:
        """Whether a run was started here."""
        return (self.path / "run.yaml").exists()

    def set_aside(self) -> Path:
        """Rename an earlier run's directory to the first free ``NAME.N``; nothing of it is lost."""
        number = 1
        while (target := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        self.path.rename(target)
        return target

    # --- writing ------------------------------------------------------------------------------------------------------

    def write_text(self, name: str, text: str) -> None:
        """Write a whole file atomically."""
        target = self.path / name
        partial = target.with_name(target.name + ".partial")
        try:
            with partial.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            partial.rename(target)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise write_error(target, error) from error

    def append(self, file: Path, record: Mapping[str, Any]) -> None:
        """Append one JSON object as a line; on disk when this returns, and the file never ends in half a line.

        A half line that a crash left is cut off first: glued to the next one it would spoil both.

        Raises:
            RunError: it could not be written; the lines before it stand.
        """
        line = (json.dumps(_finite(record), sort_keys=True, ensure_ascii=False) + "\n").encode()
        _cut_half_line(file)
        # Unbuffered: a buffer that could not be flushed would be written again, and fail again, on closing.
        with file.open("ab", buffering=0) as target:
            before = target.tell()
            try:
                if target.write(line) != len(line):
                    raise OSError(errno.ENOSPC, "only a part could be written")
                os.fsync(target.fileno())
            except OSError as error:
                os.truncate(file, before)
                raise write_error(file, error) from error

    def event(self, kind: str, **facts: Any) -> None:
        self.append(self.events, {"time": round(time.time(), 3), "event": kind, **facts})

    def last_step(self) -> int | None:
        """Step of the last line of metrics; None without any."""
        steps = [record["step"] for record in read_lines(self.metrics)]
        return steps[-1] if steps else None

    def scored_steps(self) -> set[int]:
        """Steps with a line of their late evaluation."""
        return {record["step"] for record in read_lines(self.evals)}

    def keep_steps_before(self, step: int) -> None:
        """Drop the lines of `step` and later from metrics, timings and late scores, and a half line of a crash."""
        for file in (self.metrics, self.timings, self.evals):
            if file.exists():
                kept = [record for record in read_lines(file) if record["step"] < step]
                lines = (json.dumps(record, sort_keys=True, ensure_ascii=False) + "\n" for record in kept)
                self.write_text(file.name, "".join(lines))


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Objects of a JSON-lines file; a last line without its newline is one that a crash cut off and is passed over.

    Raises:
        DataError: a whole line is no JSON object.
    """
    if not file.exists():
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.endswith(b"\n"):
                yield _parse_line(line, f"{file}:{number}")


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8
        found = str(error)
    else:
        if isinstance(parsed, dict):
            return parsed
        found = type(parsed).__name__
    raise DataError(
        "the run's record is damaged",
        expected="one JSON object a line",
        found=found,
        where=where,
        do="repair or remove the line",
    )


def _cut_half_line(file: Path) -> None:
    if not file.exists() or not file.stat().st_size:
        return
    with file.open("rb+") as target:
        target.seek(-1, os.SEEK_END)
        if target.read(1) != b"\n":
            target.seek(0)
            target.truncate(target.read().rfind(b"\n") + 1)


def _finite(record: Mapping[str, Any]) -> dict[str, Any]:
    """NaN and infinities become null: they are not JSON."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def write_error(path: Path, error: OSError) -> RunError:
    """What to raise when `path` could not be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return RunError(
        "the disk is full" if full else f"cannot write: {error}",
        where=str(path),
        do="free space, then continue with --resume; what was written before is intact" if full else "check the folder",
    )
