"""Publish and apply through every crash: a reader never gets a partial version, and everyone recovers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from miles_transports.delta.checkout import published
from miles_transports.delta.codec import Encoding
from miles_transports.delta.files import Files, Part
from miles_transports.delta.store import FolderStore

from .conftest import LINEAGE, World, holds


class Crash(BaseException):
    """The process is gone. No handler of ours may turn it into anything else."""


class CrashingFiles(Files):
    """Dies right after the system call number `after`, and in the middle of a write where that is one."""

    def __init__(self, after: int) -> None:
        self.after, self.calls = after, 0

    def _done(self) -> None:
        self.calls += 1
        if self.calls == self.after:
            raise Crash

    def wrote(self, path: Path) -> None:
        self._done()

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> int:
        written = super().write(path, self._opened(chunks))
        self._done()
        return written

    def _opened(self, chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        self._done()  # the file is there, and empty
        yield from chunks

    def fill(self, path: Path, header: bytes, parts: Sequence[Part], threads: int) -> None:
        super().fill(path, header, parts, threads)
        self._done()

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self._done()

    def sync_dir(self, path: Path) -> None:
        super().sync_dir(path)
        self._done()

    def make_dir(self, path: Path) -> None:
        super().make_dir(path)
        self._done()

    def link(self, source: Path, target: Path) -> None:
        super().link(source, target)
        self._done()

    def remove(self, path: Path) -> None:
        if path.is_dir():  # half of it is gone when the process dies
            for child in sorted(path.iterdir())[:1]:
                if child.is_file():
                    child.unlink()
            self._done()
        super().remove(path)
        self._done()


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies loses nothing that it wrote; only a machine does."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.mark.usefixtures("no_fsync")
def test_a_crash_after_any_system_call_of_publish_shows_a_whole_version_or_none(make: Callable[..., World]) -> None:
    after, crashed = 0, True
    while crashed:
        after += 1
        world = make(snapshot_every=2)
        assert isinstance(world.store, FolderStore)
        crashing = FolderStore(world.store.root, CrashingFiles(10**9))
        world.start(crashing)
        world.publish(1)
        crashing.files = CrashingFiles(after)
        try:
            world.publish(2)
            crashed = False
        except Crash:
            pass
        for each in published(world.store, LINEAGE):  # whatever a reader sees is whole
            if not each.full and each.version >= 1:
                assert holds(world.checkout(local=world.local / str(each.version)).materialise(each.key), each.version)
        world.start()  # the trainer again, from the checkpoint
        assert holds(world.checkout().materialise(world.publish(3)), 3)
        shutil.rmtree(world.store.root)
    assert after > 25, "the protocol has more system calls than that"


@pytest.mark.usefixtures("no_fsync")
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_crash_after_any_system_call_of_apply_leaves_whole_copies_and_the_next_try_succeeds(
    make: Callable[..., World], encoding: Encoding
) -> None:
    after, crashed = 0, True
    world = make(encoding=encoding)
    keys = [world.publish(version) for version in range(4)]
    while crashed:
        after += 1
        local = world.local / str(after)
        for key in keys[:3]:
            world.checkout(local=local).materialise(key)
        try:
            world.checkout(CrashingFiles(after), local).materialise(keys[3])
            crashed = False
        except Crash:
            pass
        checkout = world.checkout(local=local)
        for key in keys:
            if checkout.folder(key).is_dir():
                assert holds(checkout.folder(key), key[0]), f"a partial copy looks complete after call {after}"
        assert holds(checkout.materialise(keys[3]), 3)
        assert not list((local / LINEAGE).glob(".partial-*")) or not crashed or checkout.complete()
    assert after > 10, "the protocol has more system calls than that"
