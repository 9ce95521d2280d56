"""Blocks of bytes that another process of this host maps: GPU memory through CUDA IPC, main memory through /dev/shm.

The owner makes a block once and uses it again and again; its handle is a line of text. A block of this very process is
found by its number, since CUDA does not open a handle where it was made.

A file in /dev/shm outlives its processes. So a block loses its name once all have mapped it, and until then its owner
holds a lock on it, which ends with the process: whoever makes a block removes those that nobody locks.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import torch

from miles_core.errors import TransportError

SHARED_MEMORY = Path("/dev/shm")
"""Main memory under file names, on every Linux."""
PREFIX = "miles-block-"
_DEVICE_ARGUMENT = 6
"""Where `torch.multiprocessing.reductions.rebuild_cuda_tensor` takes the device's index."""

_numbers = itertools.count()
_own: dict[int, torch.Tensor] = {}


class SharedBlock:
    """u8[num_bytes] on `device`, owned by this process.

    Raises:
        TransportError: shared memory has no room for it.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._number = next(_numbers)
        self._named: tuple[Path, int] | None = None  # and the handle that holds the lock
        if device.type == "cuda":
            self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            data = base64.b64encode(pickle.dumps(_cuda_handle(self.bytes))).decode()
        else:
            self._named = _reserve(num_bytes)
            data = str(self._named[0])
            self.bytes = torch.from_file(data, shared=True, size=num_bytes, dtype=torch.uint8)
        _own[self._number] = self.bytes
        self.handle = json.dumps([os.getpid(), self._number, device.type, num_bytes, data])

    @property
    def num_bytes(self) -> int:
        return self.bytes.numel()

    def mapped(self) -> None:
        """Give the name up: all who read the block have mapped it, and it goes with the last of them. Idempotent."""
        named, self._named = self._named, None
        if named is not None:
            path, handle = named
            path.unlink(missing_ok=True)
            os.close(handle)

    def close(self) -> None:
        """Give the block up; who mapped it keeps what it sees. Idempotent."""
        _own.pop(self._number, None)
        self.mapped()


def _reserve(num_bytes: int) -> tuple[Path, int]:
    """A locked file of so many bytes in shared memory; taken now, since memory that is missing later is a bus error."""
    _remove_orphans()
    path, handle = _locked_file()
    try:
        os.posix_fallocate(handle, 0, num_bytes)
    except OSError as error:
        path.unlink()
        os.close(handle)
        room = os.statvfs(SHARED_MEMORY)
        raise TransportError(
            "shared memory is too small",
            expected=f"{num_bytes} bytes for a block",
            found=f"{room.f_bavail * room.f_frsize} bytes free ({error.strerror})",
            where=str(SHARED_MEMORY),
            do="give the container more (docker run --shm-size), or set backend.bucket_mib lower",
        ) from error
    return path, handle


def _locked_file() -> tuple[Path, int]:
    while True:
        handle, name = tempfile.mkstemp(prefix=f"{PREFIX}{os.getpid()}-", dir=SHARED_MEMORY)
        fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return Path(name), handle
        os.close(handle)  # another process took it for an orphan before it was locked


def _remove_orphans() -> None:
    """Blocks whose owner was killed before they were mapped. Process ids would not do: containers share the folder."""
    for path in SHARED_MEMORY.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            handle = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while the owner lives
                path.unlink()
            finally:
                os.close(handle)


def open_block(handle: str, device: torch.device) -> torch.Tensor:
    """Map another process's block.

    Args:
        device: The GPU this process works on; the same GPU may have another index in the owner's process.

    Returns:
        u8[num_bytes], the owner's memory itself.

    Raises:
        TransportError: the block is gone, or on a device that this process cannot map.
    """
    pid, number, kind, num_bytes, data = json.loads(handle)
    if pid == os.getpid() and number in _own and kind == "cuda":
        return _own[number]
    try:
        if kind == "cpu":
            if not Path(data).is_file():  # torch would make one, and nobody would write into it
                raise FileNotFoundError(f"{data} is gone")
            return torch.from_file(data, shared=True, size=num_bytes, dtype=torch.uint8)
        return _open_cuda(pickle.loads(base64.b64decode(data)), device)
    except (RuntimeError, FileNotFoundError) as error:
        raise TransportError(
            "a shared block cannot be mapped",
            found=str(error).splitlines()[0],
            do="place trainer and engine on one host",
        ) from error


def _cuda_handle(tensor: torch.Tensor) -> tuple[Any, ...]:
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    return tuple(arguments)


def _open_cuda(arguments: tuple[Any, ...], device: torch.device) -> torch.Tensor:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    torch.cuda.set_device(device)
    here = list(arguments)
    here[_DEVICE_ARGUMENT] = device.index
    block: torch.Tensor = rebuild_cuda_tensor(*here)  # type: ignore[no-untyped-call]
    return block
