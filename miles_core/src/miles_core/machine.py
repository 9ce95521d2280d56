"""What this machine has, as far as it says without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ASK_S = 20.0
"""Seconds that the GPU's driver may take to answer; one that nobody keeps loaded takes a few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What there is to run on. Injected, so that a plan can be made for another machine."""

    cpus: int
    memory_bytes: int | None = None
    """Main memory that this process may use."""
    devices: int = 0
    """CUDA devices."""
    device_bytes: int | None = None
    """Memory of the smallest CUDA device, None when nobody told."""

    @staticmethod
    def here() -> Host:
        """This machine: devices are counted by their device files, and the driver's tool is asked for their memory."""
        devices = count_devices()
        return Host(
            cpus=os.cpu_count() or 1,
            memory_bytes=_memory(),
            devices=devices,
            device_bytes=_device_memory() if devices else None,
        )


def count_devices(folder: Path = Path("/dev"), environ: Mapping[str, str] = os.environ) -> int:
    """NVIDIA devices this process may use."""
    present = sum(1 for path in folder.glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdecimal())
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return present if visible is None else min(present, len([name for name in visible.split(",") if name.strip()]))


def _memory(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int | None:
    """Main memory, or what a container may use of it (docs.kernel.org/admin-guide/cgroup-v2.html, memory.max)."""
    pages = os.sysconf("SC_PHYS_PAGES") if "SC_PHYS_PAGES" in os.sysconf_names else 0
    memory = pages * os.sysconf("SC_PAGE_SIZE") if pages > 0 else None
    try:
        allowed = int(limit.read_text())
    except (OSError, ValueError):  # no such limit, or `max`
        return memory
    return min(memory, allowed) if memory else allowed


def _device_memory() -> int | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    ask = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(ask, capture_output=True, text=True, timeout=ASK_S, check=True).stdout
        return min(int(line) for line in said.split()) * 2**20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
