"""`miles` in processes forked from one that has imported torch and transformers already: six seconds less for each.

For tests of whole runs. A test of how a run starts from nothing starts Python itself.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from unittest import mock

_context = multiprocessing.get_context("forkserver")
# pyarrow imports pandas where there is one.
_context.set_forkserver_preload(["miles_core.driver.launch", "transformers.modeling_utils", "pandas"])


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def start(
    arguments: Sequence[str], output: str = os.devnull, errors: str = os.devnull, **variables: str
) -> ForkServerProcess:
    """`miles ARGUMENTS`, which writes into two files; it has a pid, can be killed and waited for."""
    process = _context.Process(target=_miles, args=(arguments, {**environment(), **variables}, output, errors))
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
        process = start(arguments, str(output), str(errors), **variables)
        process.join(timeout_s)
        late = process.exitcode is None
        if late:
            process.kill()
            process.join()
        texts = [file.read_text() if file.exists() else "" for file in (output, errors)]
        if late:
            raise subprocess.TimeoutExpired(arguments, timeout_s, *texts)
        return subprocess.CompletedProcess(arguments, process.exitcode or 0, *texts)


def _miles(arguments: Sequence[str], variables: dict[str, str], output: str, errors: str) -> None:
    os.environ.clear()
    os.environ.update(variables)
    for file, stream in ((output, 1), (errors, 2)):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, stream)
        os.close(opened)
    sys.argv = ["miles", *arguments]
    from miles_core.cli import main

    main(arguments, prog_name="miles")
