"""Publish and apply, version after version."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from miles_core.errors import TransportError
from miles_core.types import NamedTensor
from miles_core.weights.buckets import bucket_tensors
from miles_transports.delta.checkout import published
from miles_transports.delta.codec import Encoding
from miles_transports.delta.index import BASE, CHECKPOINT

from .conftest import LINEAGE, Weights, World, holds, weights


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


def test_who_has_a_copy_mapped_keeps_its_bytes(make: Callable[..., World]) -> None:
    world, mapped, folders = make(), dict[int, Weights](), list[Path]()
    for version in range(4):
        folder = world.checkout().materialise(world.publish(version))
        folders.append(folder)
        files = folder.glob("*.safetensors")
        mapped[version] = {name: t for file in files for name, t in safetensors.torch.load_file(file).items()}
    assert [folder.exists() for folder in folders] == [False, False, True, True]
    for version, tensors in mapped.items():
        assert all(torch.equal(tensors[name], expected) for name, expected in weights(version).items())


def test_a_refused_version_gives_its_room_to_the_one_that_takes_its_place(make: Callable[..., World]) -> None:
    world = make()
    served = world.checkout().materialise(world.publish(0))
    refused = world.checkout().materialise(world.publish(1, weights(3)))
    again = world.checkout().materialise(world.publish(1))
    assert holds(again, 1)
    assert not refused.exists()
    assert holds(served, 0)


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
    world = make(snapshot_every=3, keep=2)
    keys = [world.publish(version) for version in range(8)]
    left = [(each.version, each.full) for each in published(world.store, LINEAGE)]
    assert left == [(5, False), (5, True), (6, False), (7, False)]
    assert holds(world.checkout().materialise(keys[-1]), 7)
    with pytest.raises(TransportError, match="did not become visible"):
        world.checkout(local=world.local / "other", timeout_s=0.3).materialise(keys[2])


def test_without_snapshots_nothing_is_removed_since_the_chain_hangs_on_the_checkpoint(
    make: Callable[..., World],
) -> None:
    world = make(snapshot_every=0, keep=2)
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


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("snapshot_every", [0, 2])
def test_ranks_that_are_connected_anew_go_on_with_the_chain(
    make: Callable[..., World], encoding: Encoding, snapshot_every: int
) -> None:
    world = make(encoding=encoding, snapshot_every=snapshot_every)
    for version in range(5):
        world.publish(version)
    world.connect()
    again = world.publish(4)  # for an engine that joined
    assert holds(world.checkout(local=world.local / "late").materialise(again), 4)
    world.connect()
    half = [NamedTensor(name=name, tensor=tensor + 1) for name, tensor in weights(5).items()]
    for source in world.sources:
        source.begin(5, 4)
        source.add(next(bucket_tensors(half, version=5, bucket_bytes=200)))
    key = world.publish(5)
    assert holds(world.checkout().materialise(key), 5)
    assert holds(world.checkout(local=world.local / "late").materialise(key), 5)


def test_a_version_with_a_snapshot_has_one_when_it_is_published_again(make: Callable[..., World]) -> None:
    world = make(snapshot_every=3)
    for version in (0, 1, 2, 2):
        world.publish(version)
    assert [each.version for each in published(world.store, LINEAGE) if each.full] == [2]
