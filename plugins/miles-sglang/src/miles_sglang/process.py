"""One server process and everything it spawns: started with a log of its own, ended whatever happens to Miles.

The server leads a process group. A guard, a few megabytes of another process, holds the reading end of a pipe to this
one; when this process ends, however it ends, the guard kills the group and removes the staging folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TERMINATE_S = 10.0
"""Between asking a group to end and killing it."""
LOG_TAIL_BYTES = 3000

_GUARD = """
import os, shutil, signal, sys
sys.stdin.read()
for group in filter(None, sys.argv[1:2]):
    try: os.killpg(int(group), signal.SIGKILL)
    except OSError: pass
for folder in sys.argv[2:]: shutil.rmtree(folder, ignore_errors=True)
"""


class ServerProcess:
    """A started process group.

    Args:
        argv: Command line.
        env: The whole environment.
        log: File that takes stdout and stderr, appended to; None discards them.
        scratch: Folders the guard removes should this process vanish.
    """

    def __init__(self, argv: Sequence[str], env: dict[str, str], log: Path | None, scratch: Sequence[Path]) -> None:
        self.log = log
        with contextlib.ExitStack() as stack:
            sink = stack.enter_context(log.open("ab")) if log is not None else subprocess.DEVNULL
            self._process = subprocess.Popen(
                argv, env=env, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD, str(self._process.pid), *map(str, scratch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    async def wait(self) -> int:
        """Until the process ends by itself."""
        while (code := self._process.poll()) is None:  # noqa: ASYNC110 -- a process has no event to wait for
            await asyncio.sleep(0.2)
        return code

    async def stop(self) -> None:
        """End the group: first by asking, then by force. Returns when none of it is left. Idempotent."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TERMINATE_S):
                while self._process.poll() is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        self.kill()

    def kill(self) -> None:
        """End the group by force, and the guard."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        if self._guard.poll() is None:
            self._guard.kill()
        self._guard.wait()
        if self._guard.stdin is not None:
            self._guard.stdin.close()

    def tail(self) -> str:
        """The last lines of the log."""
        if self.log is None or not self.log.exists():
            return "no log; set engine.log_dir"
        with self.log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - LOG_TAIL_BYTES))
            return file.read().decode("utf-8", "replace")

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def free_port() -> int:
    """A port that is free now; the server is told at once."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
