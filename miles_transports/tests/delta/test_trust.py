"""What is damaged, late, foreign or shared by several: found, waited for, refused, done once."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch

from miles_core.errors import TransportError
from miles_transports.delta import index, tensorfile
from miles_transports.delta.checkout import published
from miles_transports.delta.codec import Encoding
from miles_transports.delta.files import Files
from miles_transports.delta.index import BASE
from miles_transports.delta.store import FolderStore, ObjectStore

from .conftest import LINEAGE, World, holds, weights


def damage(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 0xFF
    path.unlink()
    path.write_bytes(raw)


def test_a_damaged_local_copy_is_found_and_rebuilt_from_the_checkpoint(make: Callable[..., World]) -> None:
    world = make()
    folder = world.checkout().materialise(world.publish(0))
    key = world.publish(1)
    for file in folder.glob("*.safetensors"):
        damage(file)
    assert holds(world.checkout().materialise(key), 1)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_damaged_delta_is_refused_by_the_name_of_its_tensor(make: Callable[..., World], encoding: Encoding) -> None:
    world = make(encoding=encoding)
    key = world.publish(0)
    assert isinstance(world.store, FolderStore)
    for shard in (world.store.root / LINEAGE / "weight_v000000").glob("*.safetensors"):
        damage(shard)
    with pytest.raises(TransportError, match=r"cannot be built here(.|\n)*tensor .* of version 0"):
        world.checkout().materialise(key)
    assert world.checkout().complete() == []


def test_a_half_applied_delta_is_caught_by_the_checksum_of_the_result(make: Callable[..., World]) -> None:
    world = make()
    world.checkout().materialise(world.publish(0))
    key = world.publish(1)
    half = world.local / LINEAGE / world.checkout().complete()[0]
    target = next(iter(half.glob("model-00001*")))
    newer = weights(1)
    old = weights(0)
    mixed = {
        n: newer[n] if n == "embed.weight" else old[n] for n in sorted(old)[:3]
    }  # one tensor is patched already: xor would undo it
    target.unlink()
    safetensors.torch.save_file(mixed, target)
    assert holds(world.checkout().materialise(key), 1)
    assert len(world.checkout().complete()) == 1, "the damaged copy was kept"
    assert not list(half.parent.glob(".partial-*")), "what was given up takes room"


def test_ranks_that_disagree_on_a_replicated_tensor_publish_nothing(make: Callable[..., World]) -> None:
    listings = [
        index.RankListing(rank=r, world_size=2, shard="s", num_bytes=1, changed={"w": c}, owned=("w",))
        for r, c in enumerate(["aa", "bb"])
    ]
    with pytest.raises(TransportError, match="conflicting: w"):
        index.merge_listings(listings, ["w"], 3)
    same = [listings[0], replace(listings[0], rank=1, shard="t")]
    assert index.merge_listings(same, ["w"], 3)[0] == {"w": "s"}
    with pytest.raises(TransportError, match="from nobody: v"):
        index.merge_listings(same, ["w", "v"], 3)


OUTSIDE = ("../../etc/passwd", "/abs.safetensors", "model-1.safetensors", "x/model-00001-of-00001.safetensors")


@pytest.mark.parametrize("shard", OUTSIDE)
def test_an_index_that_points_outside_its_folder_is_refused(make: Callable[..., World], shard: str) -> None:
    world = make()
    key = world.publish(0)
    name = f"{LINEAGE}/weight_v000000/{index.INDEX}"
    raw = world.store.read(name).replace(b"model-00001-of-00002.safetensors", shard.encode())
    with pytest.raises(TransportError, match="cannot be read"):
        index.parse(raw, name)
    world.store.write(name, [raw])
    with pytest.raises(TransportError, match="cannot be read"):
        world.checkout().materialise(key)


def test_versions_of_two_chains_are_not_mixed(make: Callable[..., World]) -> None:
    world = make()
    world.publish(0)
    key = world.publish(1)
    world.start()
    world.publish(0, weights(3))  # another chain's version 0 in its place
    with pytest.raises(TransportError, match="do not form one chain"):
        world.checkout().materialise(key)


class LateStore(FolderStore):
    """Shows an object only a while after it was written, the index first: as NFS caches may."""

    delay_s = 0.15

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.born: dict[str, float] = {}

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
        self.born[name] = time.monotonic() + (0 if name.endswith("index.json") else self.delay_s)
        return super().write(name, chunks)

    def _visible(self, name: str) -> None:
        if time.monotonic() < self.born.get(name, 0):
            raise FileNotFoundError(name)

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        self._visible(name)
        return super().read(name, start, length)

    def size(self, name: str) -> int:
        self._visible(name)
        return super().size(name)


def test_what_is_not_visible_yet_is_waited_for_and_not_for_ever(make: Callable[..., World], tmp_path: Path) -> None:
    store = LateStore(tmp_path / "late")
    world = make(store=store)
    assert holds(world.checkout().materialise(world.publish(0)), 0)
    world.visible_s, store.delay_s = 0.2, 3600
    world.start()
    with pytest.raises(TransportError, match=r"did not become visible within 0\.2 s"):
        world.publish(1)


def test_versions_live_in_an_object_store(make: Callable[..., World]) -> None:
    world = make(store=ObjectStore(f"memory://bucket-{os.getpid()}/versions"), snapshot_every=2, keep=1)
    keys = [world.publish(version) for version in range(5)]
    assert holds(world.checkout().materialise(keys[-1]), 4)
    assert [each.version for each in published(world.store, LINEAGE)] == [3, 3, 4]


def test_processes_of_one_host_build_a_version_once(make: Callable[..., World]) -> None:
    world = make()
    key = world.publish(0)
    renames: list[Path] = []

    class Slow(Files):
        def rename(self, source: Path, target: Path) -> None:
            time.sleep(0.05)
            renames.append(target)
            super().rename(source, target)

    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(world.checkout(Slow()).materialise(key))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 3
    assert len(renames) == 1


def test_hosts_whose_locks_do_not_hold_for_one_another_get_whole_copies_or_an_error(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One `local_dir` on a network file system for several hosts: one clears away what the other is about to finish."""
    monkeypatch.setattr(fcntl, "flock", lambda handle, operation: None)
    world, built, go_on = make(), threading.Event(), threading.Event()
    key = world.publish(0)
    outcomes: list[Path | TransportError] = []

    class First(Files):
        def rename(self, source: Path, target: Path) -> None:
            built.set()
            assert go_on.wait(60)
            super().rename(source, target)

    class Second(Files):
        def remove(self, path: Path) -> None:
            if path.is_dir():
                min(path.glob("*.safetensors")).unlink()
                go_on.set()
                first.join(60)
            super().remove(path)

    def build(files: Files) -> None:
        try:
            outcomes.append(world.checkout(files).materialise(key))
        except TransportError as error:
            outcomes.append(error)

    first = threading.Thread(target=build, args=(First(),))
    first.start()
    assert built.wait(60)
    build(Second())
    for name in world.checkout().complete():
        assert holds(world.local / LINEAGE / name, 0), f"{name} looks complete and is not"
    refused, whole = outcomes
    assert "transport.local_dir" in str(refused)
    assert isinstance(whole, Path)
    assert holds(whole, 0)


def test_a_rank_keeps_bytes_of_its_own_share_only(make: Callable[..., World]) -> None:
    world = make()
    for version in range(3):
        world.publish(version)
    held = [set(source._bytes) for source in world.sources]
    assert held[0].isdisjoint(held[1])
    assert held[0] | held[1] <= set(weights(BASE)) - {"frozen.weight"}
    assert all(held)


def test_tensors_are_read_without_loading_files(make: Callable[..., World]) -> None:
    folder = tensorfile.Folder(make().base)
    data = folder.data("embed.weight")
    assert isinstance(data.base, np.memmap) or isinstance(data, np.memmap)
    assert not data.flags.writeable


class FullDisk(Files):
    def wrote(self, path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_named_with_what_it_should_hold(make: Callable[..., World]) -> None:
    world = make()
    key = world.publish(0)
    with pytest.raises(TransportError, match=r"transport\.local_dir") as caught:
        world.checkout(files=FullDisk()).materialise(key)
    assert "3 copies" in str(caught.value)
    assert str(world.local) in str(caught.value)
    assert holds(world.checkout().materialise(key), 0)


def test_a_folder_that_cannot_be_made_is_named(make: Callable[..., World], tmp_path: Path) -> None:
    world = make()
    key = world.publish(0)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(TransportError, match=r"transport\.local_dir") as caught:
        world.checkout(local=tmp_path / "file" / "local").materialise(key)
    assert "NotADirectoryError" in str(caught.value)


@pytest.mark.parametrize(("errno_", "do"), [(errno.ENOSPC, r"snapshot_every"), (errno.EACCES, r"may use it")])
def test_a_publication_that_is_full_or_forbidden_is_named(make: Callable[..., World], errno_: int, do: str) -> None:
    class Refusing(Files):
        def wrote(self, path: Path) -> None:
            raise OSError(errno_, os.strerror(errno_))

    world = make()
    assert isinstance(world.store, FolderStore)
    world.store.files = Refusing()
    with pytest.raises(TransportError, match=do) as caught:
        world.publish(0)
    assert os.strerror(errno_) in caught.value.message
    assert str(world.store.root) in str(caught.value)
    world.store.files = Files()
    assert holds(world.checkout().materialise(world.publish(0)), 0)


def test_what_a_client_of_an_object_store_raises_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ObjectStore(f"memory://refusing-{os.getpid()}/versions")

    class NoCredentials(Exception):
        pass

    def refuse(*_: object, **__: object) -> None:
        raise NoCredentials("unable to locate credentials")

    monkeypatch.setattr(store._fs, "open", refuse)
    monkeypatch.setattr(store._fs, "cat_file", refuse)
    for attempt in (lambda: store.write("x", [b"y"]), lambda: store.read("x")):
        with pytest.raises(TransportError, match=r"NoCredentials: unable to locate credentials(.|\n)*publish_dir"):
            attempt()
