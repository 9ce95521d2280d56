"""Processes to be killed: a nursery with everything imported, which forks one for each line and buries it when asked.

A line is JSON: either `{"wait": PID}`, answered with the exit code, or a job with its arguments, answered with the PID.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from conftest import LINEAGE, World, holds, large

from miles_core.types import NamedTensor
from miles_core.weights.buckets import bucket_tensors
from miles_transports.delta.checkout import published
from miles_transports.delta.files import Files, Part
from miles_transports.delta.store import FolderStore


class TellingFiles(Files):
    """Writes a byte to a pipe after each system call."""

    def __init__(self, pipe: str) -> None:
        self._pipe = os.open(pipe, os.O_WRONLY)

    def wrote(self, path: Path) -> None:
        os.write(self._pipe, b".")

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> int:
        written = super().write(path, self._opened(path, chunks))
        self.wrote(path)
        return written

    def _opened(self, path: Path, chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        self.wrote(path)  # the file is there, and empty
        yield from chunks

    def fill(self, path: Path, header: bytes, parts: Sequence[Part], threads: int) -> None:
        super().fill(path, header, parts, threads)
        self.wrote(path)

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.wrote(target)

    def sync_dir(self, path: Path) -> None:
        super().sync_dir(path)
        self.wrote(path)

    def link(self, source: Path, target: Path) -> None:
        super().link(source, target)
        self.wrote(target)

    def remove(self, path: Path) -> None:
        super().remove(path)
        self.wrote(path)


def publish(world: World, files: Files, versions: Sequence[int]) -> None:
    """All of a trainer, both ranks and the driver."""
    assert isinstance(world.store, FolderStore)
    world.start(FolderStore(world.store.root, files))
    for version in versions:
        world.publish(version)


def export(world: World, files: Files, rank: int, version: int, base_version: int, full: bool) -> None:
    """One rank's part of one version."""
    assert isinstance(world.store, FolderStore)
    source = world.source(rank, 2, FolderStore(world.store.root, files))
    source.begin(version, base_version)
    named = [NamedTensor(name=name, tensor=tensor) for name, tensor in large(version).items()]
    for bucket in bucket_tensors(named, version=version, bucket_bytes=200):
        source.add(bucket)
    source.finish(full=full)
    source.close()


def build(world: World, files: Files, key: list[Any]) -> None:
    """A host's copy of one version."""
    assert holds(world.checkout(files).materialise((key[0], key[1])), key[0], large)


def follow(world: World, files: Files, last: int) -> None:
    """Whatever is newest, until that is `last`."""
    version = -1
    while version < last:
        if found := [each for each in published(world.store, LINEAGE) if not each.full]:
            version = found[-1].version
            assert holds(world.checkout(files).materialise(found[-1].key), version, large)


JOBS = {job.__name__: job for job in (publish, export, build, follow)}


def child(order: dict[str, Any]) -> NoReturn:
    code = 1
    try:
        files = TellingFiles(order.pop("pipe"))
        base, local, store = (Path(place) for place in order.pop("folders"))
        world = World(base, local, FolderStore(store), snapshot_every=2, keep=9, weights=large)
        JOBS[order.pop("job")](world, files, **order)
        code = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(code)


def main() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            _, status = os.waitpid(order["wait"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
        elif pid := os.fork():
            print(pid, flush=True)
        else:
            child(order)


if __name__ == "__main__":
    main()
