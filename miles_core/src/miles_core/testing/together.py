"""Start the ranks of a test in processes of their own, and stop them all when one fails or time is up.

The caller's script sets up its process group, runs, and leaves what it found in files.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

DEVICES = (
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
        ],
    ),
)
"""Parameters of a test over two ranks: ``cpu`` for gloo, ``cuda`` for NCCL."""


def run_ranks(
    script: Path, folder: Path, world: int, arguments: Sequence[str], *, strict: bool = True, limit_s: float = 600.0
) -> None:
    """Run ``script RANK WORLD FOLDER ARGUMENTS...`` for every rank, and return when all have ended well.

    Args:
        folder: Theirs; logs of the ranks and the file in which they meet lie there.
        strict: Warnings are errors.

    Raises:
        RuntimeError: a rank failed or did not end; the last words of all are in the message.
    """
    (folder / "meeting").unlink(missing_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    started = []
    for rank in range(world):
        command = [sys.executable, *(("-W", "error") if strict else ()), str(script), str(rank), str(world)]
        with (folder / f"log-{rank}").open("wb") as log:
            started.append(
                subprocess.Popen(
                    [*command, str(folder), *arguments],
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                )
            )
    end = time.monotonic() + limit_s
    while any(process.poll() is None for process in started) and time.monotonic() < end:
        if any(process.poll() not in (None, 0) for process in started):
            time.sleep(1)  # the others' words on losing it
            break
        time.sleep(0.1)
    for process in started:
        process.kill()
        process.wait()
    if any(process.returncode for process in started):
        logs = "\n".join((folder / f"log-{rank}").read_text()[-2000:] for rank in range(world))
        raise RuntimeError(f"exit codes {[process.returncode for process in started]}\n{logs}")
