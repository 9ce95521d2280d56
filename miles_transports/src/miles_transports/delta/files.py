"""The system calls of publishing and patching, one method each, so that a test can stop the protocol after any of them.

Nothing here is atomic but `rename`; durability is what `write` and `sync_dir` add: data first, then the name.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

Part = Iterator[tuple[int, bytes | memoryview]]
"""Offsets in a file, and what is to be written there."""


class Files:
    """On a local or network file system."""

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> int:
        """Create a file, write, fsync; returns its bytes."""
        total = 0
        with path.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
                total += len(chunk)
                self.wrote(path)
            file.flush()
            os.fsync(file.fileno())
        return total

    def fill(self, path: Path, header: bytes, parts: Sequence[Part], threads: int) -> None:
        """Create a file of a header and parts that know their places, several at once; fsync.

        Args:
            parts: Each yields offsets and bytes, and is run in one thread.
        """
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            _write_all(handle, header, 0)
            with ThreadPoolExecutor(threads, thread_name_prefix="miles-delta") as pool:
                jobs = [pool.submit(self._fill, path, handle, part) for part in parts]
                try:
                    for job in jobs:
                        job.result()
                finally:
                    for job in jobs:
                        job.cancel()
            os.fsync(handle)
        finally:
            os.close(handle)

    def _fill(self, path: Path, handle: int, part: Part) -> None:
        for offset, chunk in part:
            _write_all(handle, chunk, offset)
            self.wrote(path)

    def wrote(self, path: Path) -> None:
        """Called after each chunk of `write` and `fill`."""

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def sync_dir(self, path: Path) -> None:
        """Make the names in a folder durable."""
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def make_dir(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def link(self, source: Path, target: Path) -> None:
        """A second name for a file that nobody changes; a copy where the file systems differ."""
        try:
            os.link(source.resolve(), target)
        except OSError:
            shutil.copyfile(source, target)

    def remove(self, path: Path) -> None:
        """Remove a file or a whole folder; absent is fine."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _write_all(handle: int, data: bytes | memoryview, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        count = os.pwrite(handle, rest, offset)
        rest, offset = rest[count:], offset + count
