"""Where versions are published: a folder that every host sees, or an object store through fsspec.

Two promises are all that the protocol needs: an object that `write` returned from is complete wherever it is visible at
all, and it becomes visible sooner or later. Order between objects is not promised (NFS caches attributes), so readers
wait for what an index names.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

from miles_core.errors import TransportError
from miles_core.watch import waiting
from miles_transports.delta.files import Files

T = TypeVar("T")

POLL_S = 0.05


class Store(Protocol):
    """Objects by name; names use ``/`` and come from this package only."""

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
        """Publish an object completely or not at all; returns its bytes."""
        ...

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Raises FileNotFoundError where the object is not visible."""
        ...

    def size(self, name: str) -> int: ...
    def list(self, prefix: str) -> list[str]:
        """Names right below `prefix` (``""`` is the root), sorted."""
        ...

    def remove(self, name: str) -> None:
        """Remove an object or all below a name."""
        ...


@contextlib.contextmanager
def told(doing: str, where: str) -> Iterator[None]:
    """Say what was tried, where, and what to do, when a file system or an object store refuses.

    Raises:
        FileNotFoundError: as it is; who reads waits for what is not visible yet.
        TransportError: anything else.
    """
    try:
        yield
    except (FileNotFoundError, TransportError):
        raise
    except Exception as error:  # whatever the client of an object store raises
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise TransportError(
            f"{doing} failed: {getattr(error, 'strerror', None) or error or type(error).__name__}",
            expected="room for a snapshot and the versions since" if full else "permission, and storage that answers",
            found=f"{type(error).__name__}: {error}",
            where=where,
            do="make room at transport.publish_dir, or lower transport.keep and transport.snapshot_every"
            if full
            else "check transport.publish_dir and that the processes of trainer and engines may use it",
        ) from error


class FolderStore:
    """A local or NFS-like folder."""

    def __init__(self, root: Path, files: Files | None = None) -> None:
        self.root = root
        self.files = files or Files()

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
        target = self.root / name
        partial = target.with_name(f".{target.name}.partial")
        with told("publishing", str(target)):
            self.files.make_dir(target.parent)
            num_bytes = self.files.write(partial, chunks)
            self.files.rename(partial, target)
            self.files.sync_dir(target.parent)
        return num_bytes

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        with told("reading what is published", str(self.root / name)), (self.root / name).open("rb") as file:
            file.seek(start)
            return file.read() if length is None else file.read(length)

    def size(self, name: str) -> int:
        return (self.root / name).stat().st_size

    def list(self, prefix: str) -> list[str]:
        folder = self.root / prefix
        return sorted(p.name for p in folder.iterdir() if not p.name.startswith(".")) if folder.is_dir() else []

    def remove(self, name: str) -> None:
        self.files.remove(self.root / name)


class ObjectStore:
    """Anything fsspec opens: ``s3://bucket/path``, ``gs://…``, ``memory://…``. Its puts are atomic by nature."""

    def __init__(self, url: str) -> None:
        self._fs: Any
        try:
            import fsspec

            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise TransportError(
                "a URL of published versions cannot be opened",
                expected="a scheme that fsspec knows, with its package installed",
                found=str(error),
                where=url,
                do="pip install './miles_transports[object-store]' and the package of the scheme, or name a folder",
            ) from error

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
        total, path = 0, f"{self._root}/{name}"
        with told("publishing", path), self._fs.open(path, "wb") as file:
            for chunk in chunks:
                file.write(bytes(chunk))
                total += len(chunk)
        return total

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        end = None if length is None else start + length
        with told("reading what is published", f"{self._root}/{name}"):
            data: bytes = self._fs.cat_file(f"{self._root}/{name}", start=start, end=end)
        return data

    def size(self, name: str) -> int:
        return int(self._fs.size(f"{self._root}/{name}"))

    def list(self, prefix: str) -> list[str]:
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(f"{self._root}/{prefix}".rstrip("/"), detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

    def remove(self, name: str) -> None:
        if self._fs.exists(f"{self._root}/{name}"):
            self._fs.rm(f"{self._root}/{name}", recursive=True)


def open_store(place: str) -> Store:
    """A store of a folder's path, or of a URL."""
    return ObjectStore(place) if "://" in place else FolderStore(Path(place))


def eventually(read: Callable[[], T], what: str, timeout_s: float, check: Callable[[], None] = lambda: None) -> T:
    """Retry `read` while it raises FileNotFoundError: what was published elsewhere may not be visible here yet.

    Args:
        check: Called between tries; raises when waiting has become pointless.

    Raises:
        TransportError: it did not become visible in time.
    """
    deadline = time.monotonic() + timeout_s
    with waiting("disk-delta", on=f"{what} to become visible"):
        while True:
            try:
                return read()
            except FileNotFoundError as error:
                check()
                if time.monotonic() > deadline:
                    raise TransportError(
                        f"{what} did not become visible within {timeout_s:g} s",
                        do="check that this host mounts the publication folder, or raise transport.visible_s",
                    ) from error
                time.sleep(POLL_S)


def version_names(names: Iterable[str]) -> Iterator[int]:
    """The version numbers among folder names such as ``weight_v000012``, ascending."""
    for name in sorted(names):
        digits = name.removeprefix("weight_v")
        if digits != name and digits.isdigit():
            yield int(digits)
