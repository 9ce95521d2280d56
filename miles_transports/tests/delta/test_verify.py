"""`miles delta verify` looks at everything it calls ok, and names what it cannot look at."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from miles_core.cli import main

from .conftest import LINEAGE, World


def verify(world: World, code: int = 0) -> list[str]:
    result = CliRunner().invoke(main, ["delta", "verify", str(place(world)), "--base", str(world.base)])
    assert result.exit_code == code, result.output
    return result.output.splitlines()


def place(world: World) -> Path:
    return world.base.with_name(world.base.name.replace("base", "published"))


def folder(world: World, version: int) -> Path:
    return place(world) / LINEAGE / f"weight_v{version:06d}"


@pytest.mark.parametrize("missing", [0, 1])
def test_a_version_that_is_missing_under_others_is_no_chain(make: Callable[..., World], missing: int) -> None:
    world = make(encoding="overwrite")
    for version in range(4):
        world.publish(version)
    assert verify(world)[0].startswith("ok  4 deltas up to v000003")
    shutil.rmtree(folder(world, missing))
    shown = "\n".join(verify(world, code=1))
    assert f"version {missing + 1} builds on a version that is not there" in shown
    assert f"expected: version {missing} with index" in shown


def test_deltas_whose_base_was_removed_are_called_unchecked(make: Callable[..., World]) -> None:
    world = make(snapshot_every=3, keep=1)
    for version in range(8):
        world.publish(version)
    unchecked, snapshot, chain = verify(world)
    assert unchecked == "unchecked  v000005: v000004, which it changes, was removed"
    assert snapshot.startswith("ok  full snapshot up to v000005")
    assert chain.startswith("ok  2 deltas on a full snapshot up to v000007")


def test_a_damaged_delta_behind_a_snapshot_is_found(make: Callable[..., World]) -> None:
    world = make(snapshot_every=3, keep=9)
    for version in range(6):
        world.publish(version)
    shard = next(folder(world, 1).glob("*.safetensors"))
    raw = bytearray(shard.read_bytes())
    raw[-2] ^= 1
    shard.write_bytes(raw)
    assert "of version 1" in "\n".join(verify(world, code=1))
