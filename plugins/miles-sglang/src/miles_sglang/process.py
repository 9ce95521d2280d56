"""One server process and everything it spawns: started with a log of its own, ended whatever happens to Miles.

The server leads a process group. A guard, a few megabytes of another process, holds the reading end of a pipe to this
one; when this process ends, however it ends, the guard kills the group and removes the staging folder. Beside an
attached server there is no group, and the guard removes the folder alone.

SGLang ends by killing itself, and so leaves what it made outside of its processes: sockets and locks in the temporary
folder, which is therefore a private one, and files in shared memory, whose names are found among its mappings.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

TERMINATE_S = 10.0
"""Between asking a group to end and killing it."""
LOG_TAIL_BYTES = 3000

PORT_TAKEN = (b"already in use", b"eaddrinuse", b"is not available in")
"""Words of asyncio and ZeroMQ, of torch, and of SGLang itself."""

SHARED_MEMORY = Path("/dev/shm")
LEFT_BEHIND = ("sglang_loads_", "sem.mp-")
"""Names of what a killed server leaves in shared memory: its ledger of loads, and the semaphores of its children."""

_GUARD = """
import os, shutil, signal, sys
files = sys.stdin.read().splitlines()
for group in filter(None, sys.argv[1:2]):
    try: os.killpg(int(group), signal.SIGKILL)
    except OSError: pass
for folder in sys.argv[2:]: shutil.rmtree(folder, ignore_errors=True)
for file in files:
    try: os.unlink(file)
    except OSError: pass
"""


class Guard:
    """Waits for this process to vanish, then ends a group and removes folders and files.

    Args:
        group: Leader of the process group; None where there is none.
        scratch: Folders to remove.
    """

    def __init__(self, group: int | None, scratch: Sequence[Path]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD, "" if group is None else str(group), *map(str, scratch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, files: Iterable[Path]) -> None:
        """Remove these too."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):  # somebody killed the guard
                self._process.stdin.write("".join(f"{file}\n" for file in files).encode())
                self._process.stdin.flush()

    def dismiss(self) -> None:
        """Nothing is left to guard. Idempotent."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


class ServerProcess:
    """A started process group.

    Args:
        argv: Command line.
        env: The whole environment; without TMPDIR, a private folder is made that ends with the group.
        log: File that takes stdout and stderr, appended to; None discards them.
        scratch: Folders the guard removes should this process vanish.
    """

    def __init__(self, argv: Sequence[str], env: dict[str, str], log: Path | None, scratch: Sequence[Path]) -> None:
        self.log = log
        self._log_from = log.stat().st_size if log is not None and log.exists() else 0
        self._files: set[Path] = set()
        self._temporary = Path(tempfile.mkdtemp(prefix="sglang-"))
        env = {"TMPDIR": str(self._temporary), **env}
        try:
            with contextlib.ExitStack() as stack:
                sink = stack.enter_context(log.open("ab")) if log is not None else subprocess.DEVNULL
                self._process = subprocess.Popen(
                    argv,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except BaseException:
            shutil.rmtree(self._temporary, ignore_errors=True)
            raise
        self._guard = Guard(self._process.pid, [*scratch, self._temporary])

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

    def note_files(self) -> None:
        """Remember what the group has made in shared memory, to remove it when it has ended."""
        found = set(_left_behind(self._process.pid)) - self._files
        self._files |= found
        self._guard.watch(found)

    async def stop(self) -> None:
        """End the group: first by asking, then by force. Returns when none of it is left. Idempotent."""
        self.note_files()  # of one that never became ready
        self._signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TERMINATE_S):
                while self._process.poll() is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        self.kill()

    def kill(self) -> None:
        """End the group by force, and the guard, and remove what the group leaves. Idempotent."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._guard.dismiss()
        for file in self._files:
            file.unlink(missing_ok=True)
        shutil.rmtree(self._temporary, ignore_errors=True)

    def tail(self) -> str:
        """The last lines of the log."""
        if self.log is None or not self.log.exists():
            return "no log; set engine.log_dir"
        with self.log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - LOG_TAIL_BYTES))
            return file.read().decode("utf-8", "replace")

    def lacked_port(self) -> bool:
        """Whether the log says that somebody else had a port it wanted."""
        if self.log is None or not self.log.exists():
            return False
        with self.log.open("rb") as file:
            file.seek(self._log_from)
            said = file.read().lower()
        return any(words in said for words in PORT_TAKEN)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def _left_behind(group: int) -> Iterator[Path]:
    """Files in shared memory that processes of the group have mapped and nobody would remove.

    They are known by their inodes: a semaphore is mapped before it gets its name.
    """
    mapped: set[int] = set()
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and os.getpgid(int(process.name)) == group:
                fields = [line.split(maxsplit=5) for line in (process / "maps").read_text().splitlines()]
                mapped |= {int(line[4]) for line in fields if line[-1].startswith(f"{SHARED_MEMORY}/")}
        except OSError:  # it has just ended
            continue
    for path in SHARED_MEMORY.iterdir() if mapped else ():
        with contextlib.suppress(FileNotFoundError):
            if path.name.startswith(LEFT_BEHIND) and path.stat().st_ino in mapped:
                yield path


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port of this host that nobody is given meanwhile, and that a server who is told of it may listen at.

    The socket here is bound and does not listen. So the kernel chooses the port for nobody else, and lets those bind it
    who name it with SO_REUSEADDR, as servers do (socket(7); `inet_csk_bind_conflict` in Linux).
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])
