"""The driver's side of one reward worker: starts it, exchanges frames with it, and kills it with its children.

A single task reads the pipe from the first frame to the end of file. Answers are taken from a queue, so a call under
way and a kill never read from the pipe at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import sys
from typing import Any

from miles_core.rollout.reward_worker import HEADER_BYTES

GRACE_S = 0.5
"""What the driver waits beyond the deadline for a verdict under way: the worker's own clock decides."""
BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from miles_core.rollout.reward_worker import main
main()
"""


class Lost(Exception):
    """The worker gave no answer. The message continues a sentence that begins with the worker's name."""

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class RewardProcess:
    """A fresh interpreter that runs `reward_worker.main`, in a process group of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._frames: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        """Frames not taken yet; None is the end of file."""
        self._pump = asyncio.create_task(self._read_all(), name=f"reward worker {process.pid}")

    @classmethod
    async def start(cls) -> RewardProcess:
        """Start a worker. It has imported none of the user's code yet.

        It is not a fork: the driver has threads (torch, engine), and a fork could copy them while they hold a lock. It
        gets the driver's sys.path, so that `module:attr` means the same in both. A fixed hash seed makes graders that
        iterate over sets repeatable.
        """
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                BOOT,
                json.dumps(sys.path),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "PYTHONHASHSEED": "0"},
                start_new_session=True,
            )
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    async def send(self, message: Any) -> None:
        """Write one frame.

        Raises:
            Lost: the process is gone.
        """
        body = pickle.dumps(message)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(len(body).to_bytes(HEADER_BYTES, "big") + body)
            await self._process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            raise Lost("lost its worker process before the call") from None

    async def receive(self) -> dict[str, Any]:
        """The next frame.

        Raises:
            Lost: the process ended instead.
        """
        frame = await self._frames.get()
        if frame is None:
            self._frames.put_nowait(None)  # the end stays the end, for whoever asks next
            code = await self._process.wait()
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise Lost(f"ended its worker process ({how})")
        return frame

    async def receive_within(self, timeout_s: float) -> dict[str, Any]:
        """The next frame, even if a busy event loop sees it late: only a worker that has not answered has missed its
        deadline.

        Raises:
            Lost: no frame in time, or the process ended.
        """
        receiving = asyncio.ensure_future(self.receive())
        try:
            for allowed in (timeout_s, GRACE_S):
                await asyncio.wait({receiving}, timeout=allowed)
                if receiving.done():
                    return receiving.result()
        finally:
            if not receiving.done():
                receiving.cancel()
                await asyncio.wait({receiving})
        raise Lost(f"passed its deadline of {timeout_s:g} s and was killed", timed_out=True)

    async def kill(self) -> None:
        """Kill the process and every child in its group. Returns when it is gone and both pipes are closed."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the group outlives its leader while a child is left
        # Shielded: a second cancellation must not leave a zombie and two open pipes behind.
        await asyncio.shield(asyncio.ensure_future(self._reap()))

    async def _reap(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._pump
        await self._process.wait()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            await self._process.stdin.wait_closed()

    async def _read_all(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                size = int.from_bytes(await stdout.readexactly(HEADER_BYTES), "big")
                self._frames.put_nowait(json.loads(await stdout.readexactly(size)))
        self._frames.put_nowait(None)
