"""The system calls of publishing and patching, one method each, so that a test can stop the protocol after any of them.

Nothing here is atomic but `rename`; durability is what `write` and `sync_dir` add: data first, then the name.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path


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

    def wrote(self, path: Path) -> None:
        """Called after each chunk of `write`."""

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
