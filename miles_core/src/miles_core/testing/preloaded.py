"""Runs `miles` in processes that are forked from one with torch and transformers imported: six seconds less for each.

For tests of whole runs. A test of how `miles` starts should start Python itself.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from unittest import mock

_context = multiprocessing.get_context("forkserver")
# pyarrow imports pandas where there is one.
_context.set_forkserver_preload(["miles_core.driver.launch", "transformers.modeling_utils", "pandas"])


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True, slots=True)
class Blow:
    """A signal that a process sends itself at a moment which no clock decides: before its next change to files of a
    folder, once it has made so many."""

    number: signal.Signals
    after: int
    """Changes: files opened to be written, renamed, removed, and the like for folders."""
    folder: str
    name: str = ""
    """Of the only file whose changes count, or empty."""

    def await_moment(self) -> None:
        """Strike this process when the time has come. What native code writes is not seen."""
        changes = itertools.count()

        def audit(event: str, arguments: tuple[object, ...]) -> None:
            if event in _CHANGES and self._concerns(event, arguments) and next(changes) == self.after:
                os.kill(os.getpid(), self.number)

        sys.addaudithook(audit)

    def _concerns(self, event: str, arguments: tuple[object, ...]) -> bool:
        if event == "open" and not int(str(arguments[2])) & (os.O_WRONLY | os.O_RDWR):
            return False
        path = str(arguments[0])
        return path.startswith(self.folder) and path.endswith(self.name)


_CHANGES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link"}


def start(
    arguments: Sequence[str],
    output: str = os.devnull,
    errors: str = os.devnull,
    blow: Blow | None = None,
    **variables: str,
) -> ForkServerProcess:
    """`miles ARGUMENTS`, which writes into two files; it has a pid, can be killed and waited for."""
    process = _context.Process(target=_miles, args=(arguments, {**environment(), **variables}, output, errors, blow))
    # The server is started by the first process and keeps this environment; OpenMP reads it when torch is imported.
    with mock.patch.dict(os.environ, environment()):
        process.start()
    return process


def run(arguments: Sequence[str], timeout_s: float, **variables: str) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` of `miles ARGUMENTS` with captured text, in this environment and `variables`.

    Raises:
        subprocess.TimeoutExpired: After `timeout_s` seconds, once the process is killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        process = start(arguments, str(output), str(errors), None, **variables)
        process.join(timeout_s)
        late = process.exitcode is None
        if late:
            process.kill()
            process.join()
        texts = [file.read_text() if file.exists() else "" for file in (output, errors)]
        if late:
            raise subprocess.TimeoutExpired(arguments, timeout_s, *texts)
        return subprocess.CompletedProcess(arguments, process.exitcode or 0, *texts)


def _miles(arguments: Sequence[str], variables: dict[str, str], output: str, errors: str, blow: Blow | None) -> None:
    os.environ.clear()
    os.environ.update(variables)
    for file, stream in ((output, 1), (errors, 2)):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, stream)
        os.close(opened)
    sys.argv = ["miles", *arguments]
    if blow is not None:
        blow.await_moment()
    from miles_core.cli import main

    main(arguments, prog_name="miles")
