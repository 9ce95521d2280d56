"""A host's copy of the model: version after version built beside the last one, from what is published.

    <local>/<lineage>/v000012-3f…/   a complete Hugging Face folder, named by version and digest of its index; its
                                     presence means that every checksum matched
    <local>/<lineage>/.partial-*     one being built; whoever takes the lock next removes it
    <local>/<lineage>/LOCK           one process of the host builds, the others wait and then find the folder

A version is built from the nearest one that is complete here, through every version published since (catch-up), or
from a full snapshot when that chain is broken. Files that no tensor changed in are shared by hard link. No file is ever
written over: whoever has an older copy mapped, as `from_pretrained` does, keeps its bytes, and a crash at any point
leaves complete folders and rubbish, never something in between. A folder is removed under another name: so the same
holds where several hosts share a folder and the lock does not work between them, and all but one of them get an error.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from miles_core.errors import TransportError
from miles_core.watch import waiting
from miles_core.weights.digests import name_some
from miles_transports.delta import index, tensorfile
from miles_transports.delta.chain import Changes, Check, ChecksumMismatch, ways
from miles_transports.delta.files import Files, Part
from miles_transports.delta.index import CHECKPOINT, Key, VersionIndex
from miles_transports.delta.store import POLL_S, Store, eventually, version_names

KEPT = 2
"""Complete versions kept on a host: the one served, and the one before, to fall back on when it is damaged."""

WORKERS = 32
"""Threads that unpack, check and write, at most."""
VERSION = len("v000012")
"""Characters of a folder's name that name the version."""
DIGITS = 12
"""Of an index's digest in a folder's name."""


class Checkout:
    """See the module.

    Args:
        base: The checkpoint everyone starts from; never written to.
        local: Folder for copies; a fast disk of this host. Shared by the engines of the host.
        timeout_s: Seconds to wait for what is published to become visible, and for another process's build.
    """

    def __init__(
        self, base: Path, local: Path, store: Store, lineage: str, *, timeout_s: float, files: Files | None = None
    ) -> None:
        self._base, self._root = base, local / lineage
        self._store, self._lineage, self._timeout_s = store, lineage, timeout_s
        self._files = files or Files()

    def folder(self, key: Key) -> Path:
        return self._base if key == CHECKPOINT else self._root / f"v{key[0]:06d}-{key[1][:DIGITS]}"

    def complete(self) -> list[str]:
        """Names of the copies that are complete here, oldest version first; the checkpoint is not among them."""
        return sorted(p.name for p in self._root.glob("v*-*")) if self._root.is_dir() else []

    def materialise(self, key: Key, check: Check = lambda: None) -> Path:
        """The complete folder of a published version, built when it is not here yet.

        Args:
            key: Version and digest of its index; `CHECKPOINT` for what everyone starts from.
            check: Called while waiting and between files; raises when the version is not wanted any more.

        Raises:
            TransportError: naming the tensors whose bytes did not come out right, or the version that is missing.
        """
        if self._is_here(key):
            return self.folder(key)
        try:
            self._files.make_dir(self._root)
            with self._locked(check):
                if not self._is_here(key):
                    self._clean()
                    self._build(key, check)
                    self._forget(self.folder(key).name)
        except OSError as error:
            raise self._refused(key[0], error) from error
        return self.folder(key)

    def _refused(self, version: int, error: OSError) -> TransportError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return TransportError(
                f"no room to build version {version} in {self._root}",
                expected=f"room for {KEPT + 1} copies of the model",
                found=f"{shutil.disk_usage(self._root).free} bytes free ({error.strerror})",
                where=str(self._root),
                do="point transport.local_dir at a larger disk, or remove folders of finished runs beside this one",
            )
        return TransportError(
            f"version {version} cannot be built in {self._root}: {error.strerror or error}",
            expected="a folder in which the engines' processes may make and write files",
            found=f"{type(error).__name__}: {error}",
            where=str(self._root),
            do="point transport.local_dir at a disk of each host that they may write to",
        )

    def _is_here(self, key: Key) -> bool:
        return key == CHECKPOINT or self.folder(key).is_dir()

    @contextlib.contextmanager
    def _locked(self, check: Check) -> Iterator[None]:
        deadline = time.monotonic() + self._timeout_s
        handle = os.open(self._root / "LOCK", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            with waiting("disk-delta", on=f"another process to build in {self._root}"):
                while True:
                    try:
                        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        check()
                        if time.monotonic() > deadline:
                            raise TransportError(
                                f"another process built for more than {self._timeout_s:g} s", where=str(self._root)
                            ) from None
                        time.sleep(POLL_S)
            yield
        finally:
            os.close(handle)  # and with it the lock, also when this process dies

    def _clean(self) -> None:
        for path in self._root.glob(".partial-*"):
            with contextlib.suppress(FileNotFoundError):  # a host whose lock does not hold here removed it as well
                self._discard(path)

    def _forget(self, name: str) -> None:
        """Remove all copies but `name` and the one before it, and what was refused under the version of `name`."""
        here = self.complete()
        refused = [each for each in here if each != name and each[:VERSION] == name[:VERSION]]
        older = [each for each in here if each[:VERSION] < name[:VERSION]]
        for old in refused + older[: 1 - KEPT]:
            self._discard(self._root / old)

    def _discard(self, folder: Path) -> None:
        """Remove a folder: first its name, since what is half removed must not be complete, or become so."""
        doomed = self._root / f".partial-old-{uuid.uuid4().hex}"
        self._files.rename(folder, doomed)
        self._files.remove(doomed)

    def _build(self, key: Key, check: Check) -> None:
        failures: list[str] = []
        last = eventually(lambda: self._last(key), f"version {key[0]}", self._timeout_s, check)
        for start, chain in ways(self._store, self._lineage, last, self._is_here):
            try:
                self._apply(start, chain, self.folder(key), check)
                return
            except ChecksumMismatch as error:
                # A local copy or a delta is damaged; the next way may not need it.
                failures.append(error.message)
                self._clean()
                if start != CHECKPOINT:
                    self._discard(self.folder(start))
        raise TransportError(
            f"version {key[0]} cannot be built here",
            expected="a chain of published versions from the checkpoint, a local copy, or a full snapshot",
            found="; ".join(failures) or "versions on the way were removed",
            where=str(self._root),
            do="look at the publication with `miles delta verify`; the version served before stays",
        )

    def _last(self, key: Key) -> VersionIndex:
        found = index.read_index(self._store, self._lineage, key[0])
        if found.digest != key[1]:  # replaced after a failed attempt, and not visible here yet
            raise FileNotFoundError(found.folder)
        return found

    # --- building -----------------------------------------------------------------------------------------------------

    def _apply(self, start: Key, chain: Sequence[VersionIndex], target: Path, check: Check) -> None:
        """Build the last version of `chain` out of the complete folder `start`."""
        version = chain[-1].version
        source = tensorfile.Folder(self.folder(start))
        changes = Changes(self._store, chain, self._timeout_s, check)
        unknown = sorted(changes.names - source.where.keys())
        if unknown:
            raise TransportError(
                f"version {version} changes tensors that the checkpoint does not have", found=name_some(unknown)
            )
        partial = target.with_name(f".partial-{target.name}-{uuid.uuid4().hex}")  # nobody else's, on no host
        touched = {path for path in source.files if changes.names & source.headers[path].entries.keys()}
        self._files.make_dir(partial)
        for path in sorted(source.path.iterdir()):
            check()
            if path in touched:
                threads = min(WORKERS, os.cpu_count() or 1)
                self._files.fill(partial / path.name, *_patched(source, path, changes), threads)
            elif path.is_file():
                self._files.link(path, partial / path.name)
        self._files.sync_dir(partial)
        self._files.rename(partial, target)
        self._files.sync_dir(self._root)


def _patched(source: tensorfile.Folder, path: Path, changes: Changes) -> tuple[bytes, list[Part]]:
    """Header of the file's new version, and a part for each tensor, which makes its bytes when it is run."""
    header = source.headers[path]
    ordered = sorted(header.entries.items(), key=lambda item: item[1].start)
    text = tensorfile.file_header(
        {name: (entry.dtype, entry.shape, entry.num_bytes) for name, entry in ordered}, header.metadata
    )

    def part(name: str, place: int) -> Part:
        for start, piece in changes.apply(source, name):
            yield place + start, piece.data

    ends = itertools.accumulate((entry.num_bytes for _, entry in ordered), initial=len(text))
    return text, [part(name, place) for (name, _), place in zip(ordered, ends, strict=False)]


def published(store: Store, lineage: str) -> list[VersionIndex]:
    """Every complete version of a lineage, ascending; full snapshots after the delta of their version."""
    found = []
    for version in version_names(store.list(lineage)):
        for full in (False, True):
            with contextlib.suppress(FileNotFoundError):
                found.append(index.read_index(store, lineage, version, full=full))
    return found
