"""Publish and apply through every crash: a reader never gets a partial version, and everyone recovers."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from miles_core.errors import TransportError
from miles_core.types import NamedTensor
from miles_core.weights.buckets import bucket_tensors
from miles_transports.delta import index, tensorfile
from miles_transports.delta.checkout import Checkout, published
from miles_transports.delta.codec import Encoding
from miles_transports.delta.files import Files
from miles_transports.delta.index import BASE, CHECKPOINT, Key
from miles_transports.delta.publication import Publication
from miles_transports.delta.source import DeltaSource
from miles_transports.delta.store import FolderStore, ObjectStore, Store

Weights = dict[str, torch.Tensor]
LINEAGE = "run"


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
        written = super().write(path, chunks)
        self._done()
        return written

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


def weights(version: int) -> Weights:
    """Version -1 is the checkpoint; each later one changes some tensors here and there."""
    random = torch.Generator().manual_seed(0)
    made: Weights = {
        "embed.weight": torch.randn(40, 8, generator=random).to(torch.bfloat16),
        "layers.0.q_proj.weight": torch.randn(8, 8, generator=random).to(torch.bfloat16),
        "layers.0.k_proj.weight": torch.randn(8, 8, generator=random).to(torch.bfloat16),
        "layers.1.norm.weight": torch.ones(8),
        "layers.1.bias": torch.zeros(3, dtype=torch.float64),
        "frozen.weight": torch.full((4,), 2.0),
    }
    for step in range(version + 1):
        for number, name in enumerate(sorted(made)):
            if name != "frozen.weight" and (number + step) % 2:
                made[name].view(-1)[step % made[name].numel()] += 1
    return made


@dataclass
class World:
    """Two ranks, a driver and a host, over one store."""

    base: Path
    local: Path
    store: Store
    encoding: Encoding = "xor"
    snapshot_every: int = 0
    keep: int = 1
    sources: list[DeltaSource] = field(default_factory=list)
    publication: Publication | None = None

    def start(self, store: Store | None = None) -> None:
        """The trainer's processes, anew: they remember nothing."""
        store = store or self.store
        self.close()
        self.sources = [
            DeltaSource(self.base, store, LINEAGE, rank=rank, world_size=2, encoding=self.encoding, kind="xxh3-128")
            for rank in range(2)
        ]
        self.publication = Publication(
            store,
            LINEAGE,
            encoding=self.encoding,
            kind="xxh3-128",
            snapshot_every=self.snapshot_every,
            keep=self.keep,
            visible_s=0.2,
        )

    def publish(self, version: int, tensors: Weights | None = None) -> Key:
        assert self.publication is not None
        base, full = self.publication.begin(version)
        tensors = weights(version) if tensors is None else tensors
        named = [NamedTensor(name=name, tensor=tensor) for name, tensor in tensors.items()]
        for source in self.sources:
            source.begin(version, base)
            for bucket in bucket_tensors(named, version=version, bucket_bytes=200):
                source.add(bucket)
        for source in self.sources:
            source.finish(full=full)
        key = self.publication.seal(version, tensors)
        self.publication.collect()
        return key

    def checkout(self, files: Files | None = None, local: Path | None = None) -> Checkout:
        return Checkout(self.base, local or self.local, self.store, LINEAGE, timeout_s=0.3, files=files)

    def close(self) -> None:
        for source in self.sources:
            source.close()
        self.sources = []


@pytest.fixture
def make(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., World]:
    def made(**kwargs: object) -> World:
        number = len(list(tmp_path.iterdir()))
        base = tmp_path / f"base-{number}"
        base.mkdir()
        tensors = weights(BASE)
        names = sorted(tensors)
        safetensors.torch.save_file({n: tensors[n] for n in names[:3]}, base / "model-00001-of-00002.safetensors")
        safetensors.torch.save_file({n: tensors[n] for n in names[3:]}, base / "model-00002-of-00002.safetensors")
        (base / "config.json").write_text("{}")
        store = kwargs.pop("store", None) or FolderStore(tmp_path / f"published-{number}")
        world = World(base, tmp_path / f"local-{number}", store, **kwargs)  # type: ignore[arg-type]
        request.addfinalizer(world.close)
        world.start()
        return world

    return made


def holds(folder: Path, version: int) -> bool:
    found = {name: t for file in folder.glob("*.safetensors") for name, t in safetensors.torch.load_file(file).items()}
    expected = weights(version)
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_host_follows_version_by_version_and_its_copy_is_a_hugging_face_folder(
    make: Callable[..., World], encoding: Encoding
) -> None:
    world = make(encoding=encoding)
    for version in range(5):
        folder = world.checkout().materialise(world.publish(version))
        assert holds(folder, version)
        assert (folder / "config.json").read_text() == "{}"
    assert len(world.checkout().complete()) == 2
    assert holds(world.base, BASE), "the checkpoint was written to"


def test_the_first_version_of_a_fresh_run_publishes_nothing(make: Callable[..., World]) -> None:
    world = make()
    assert world.publish(0, weights(BASE)) == CHECKPOINT
    assert published(world.store, LINEAGE) == []
    assert world.checkout().materialise(CHECKPOINT) == world.base
    assert world.publish(1)[0] == 1


def test_an_unchanged_tensor_is_not_in_the_artifact(make: Callable[..., World]) -> None:
    world = make()
    world.publish(0)
    (found,) = published(world.store, LINEAGE)
    assert "frozen.weight" not in found.weight_map
    assert set(found.weight_map.values()) == {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {**t, "extra": torch.ones(1)}, "extra is not in the checkpoint"),
        (lambda t: {k: v for k, v in t.items() if k != "embed.weight"}, "were not exported"),
        (lambda t: {**t, "embed.weight": t["embed.weight"].float()}, "not the checkpoint's"),
        (lambda t: {**t, "embed.weight": t["embed.weight"].T}, "not the checkpoint's"),
    ],
)
def test_an_export_that_is_not_the_checkpoints_is_refused_at_the_first_version(
    make: Callable[..., World], change: Callable[[Weights], Weights], message: str
) -> None:
    with pytest.raises(TransportError, match=message):
        make().publish(0, change(weights(BASE)))


def test_a_host_that_missed_versions_catches_up(make: Callable[..., World]) -> None:
    world = make()
    world.checkout().materialise(world.publish(0))
    keys = [world.publish(version) for version in range(1, 5)]
    assert holds(world.checkout().materialise(keys[-1]), 4)


def test_a_late_joiner_starts_from_a_full_snapshot_when_the_chain_is_gone(make: Callable[..., World]) -> None:
    world = make(snapshot_every=3, keep=1)
    keys = [world.publish(version) for version in range(8)]
    left = [(each.version, each.full) for each in published(world.store, LINEAGE)]
    assert left == [(5, False), (5, True), (6, False), (7, False)]
    assert holds(world.checkout().materialise(keys[-1]), 7)
    with pytest.raises(TransportError, match="did not become visible"):
        world.checkout(local=world.local / "other").materialise(keys[2])


def test_without_snapshots_nothing_is_removed_since_the_chain_hangs_on_the_checkpoint(
    make: Callable[..., World],
) -> None:
    world = make(snapshot_every=0, keep=1)
    keys = [world.publish(version) for version in range(4)]
    assert len(published(world.store, LINEAGE)) == 4
    assert holds(world.checkout().materialise(keys[-1]), 3)


def test_a_version_that_failed_on_an_engine_is_published_anew(make: Callable[..., World]) -> None:
    world = make()
    world.publish(0)
    first = world.publish(1)
    world.checkout().materialise(first)
    other = weights(1)
    other["embed.weight"][0, 0] += 5
    again = world.publish(1, other)
    assert again[0] == 1
    assert again != first
    found = safetensors.torch.load_file(world.checkout().materialise(again) / "model-00001-of-00002.safetensors")
    assert torch.equal(found["embed.weight"], other["embed.weight"])
    assert holds(world.checkout().materialise(world.publish(2)), 2)


def test_a_version_that_was_given_up_half_way_leaves_no_trace_in_the_next(make: Callable[..., World]) -> None:
    for encoding in ("xor", "overwrite"):
        world = make(encoding=encoding)
        world.publish(0)
        named = [NamedTensor(name=name, tensor=tensor + 1) for name, tensor in weights(1).items()]
        for source in world.sources:
            source.begin(1, 0)
            for bucket in bucket_tensors(named, version=1, bucket_bytes=200):
                source.add(bucket)
        assert holds(world.checkout().materialise(world.publish(1)), 1)


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
        world.publish(3)
        assert holds(world.checkout().materialise(world.publish(4)), 4)
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
    store.delay_s = 5
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
