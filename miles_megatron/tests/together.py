"""Start ranks in processes of their own, and stop them all when one fails or time is up."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

RANKS = Path(__file__).parent / "ranks.py"


def run_ranks(
    folder: Path, world: int, scenarios: Sequence[str], *, device: str = "cpu", limit_s: float = 600.0
) -> dict[str, list[Any]]:
    """What each rank found in each scenario.

    Raises:
        RuntimeError: a rank failed; its last words are in the message.
    """
    (folder / "meeting").unlink(missing_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = []
    for rank in range(world):
        command = [sys.executable, "-W", "error", str(RANKS), str(rank), str(world), str(folder), device, *scenarios]
        with (folder / f"log-{rank}").open("wb") as log:
            started.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True))
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
    return {
        name: [torch.load(folder / f"{name}-{rank}.pt", weights_only=False) for rank in range(world)]
        for name in scenarios
    }
