"""Checkpoints are complete or absent."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from miles_core.driver import checkpoint
from miles_core.errors import CheckpointError


async def write(directory: Path) -> None:
    (directory / "weights.bin").write_bytes(b"w" * 100)


async def saved(root: Path, step: int, *, keep: int | None = None) -> Path:
    return await checkpoint.save(root, step, {"cursor": step * 10}, write, keep=keep)


async def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    await saved(tmp_path, 3)
    found, passed_over = checkpoint.newest(tmp_path)
    assert found is not None
    assert (found.step, found.state, passed_over) == (3, {"cursor": 30}, [])
    assert (found.backend_dir / "weights.bin").read_bytes() == b"w" * 100


async def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        await saved(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002", "step_000003"]


async def test_a_write_that_fails_leaves_older_ones_and_no_partial(tmp_path: Path) -> None:
    await saved(tmp_path, 1)

    async def full(directory: Path) -> None:
        (directory / "weights.bin").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match="disk is full"):
        await checkpoint.save(tmp_path, 2, {}, full, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


async def test_a_crash_inside_the_backend_leaves_no_partial(tmp_path: Path) -> None:
    async def crash(directory: Path) -> None:
        raise RuntimeError("rank died")

    with pytest.raises(RuntimeError, match="rank died"):
        await checkpoint.save(tmp_path, 2, {}, crash, keep=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["truncate", "delete", "manifest", "json"])
async def test_a_damaged_checkpoint_is_passed_over_with_a_reason(tmp_path: Path, damage: str) -> None:
    await saved(tmp_path, 1)
    path = await saved(tmp_path, 2)
    weights = path / "backend" / "weights.bin"
    if damage == "truncate":
        weights.write_bytes(b"w" * 50)
    elif damage == "delete":
        weights.unlink()
    elif damage == "manifest":
        (path / "manifest.json").unlink()
    else:
        (path / "driver.json").write_text('{"format": 1, ')
    found, passed_over = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.step == 1
    assert len(passed_over) == 1
    assert "step_000002" in passed_over[0]


async def test_a_partial_directory_is_never_loaded(tmp_path: Path) -> None:
    path = await saved(tmp_path, 1)
    path.rename(tmp_path / "step_000001.partial")
    assert checkpoint.newest(tmp_path) == (None, [])
    with pytest.raises(CheckpointError, match="half-written"):
        checkpoint.load(tmp_path / "step_000001.partial")


async def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = await saved(tmp_path, 1)
    content = json.loads((path / "driver.json").read_text())
    (path / "driver.json").write_text(json.dumps({**content, "format": 99}, indent=1, sort_keys=True))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["driver.json"] = (path / "driver.json").stat().st_size
    manifest["digests"] = checkpoint._digests(path)
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="another format"):
        checkpoint.load(path)


async def test_a_flipped_bit_passes_a_checkpoint_over(tmp_path: Path) -> None:
    await saved(tmp_path, 1)
    path = await saved(tmp_path, 2)
    text = (path / "driver.json").read_text()
    (path / "driver.json").write_text(text.replace('"step": 2', '"step": 3'))
    found, (passed,) = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.step == 1
    assert "damaged" in passed


async def test_steps_sort_by_number_not_by_text(tmp_path: Path) -> None:
    for step in (999999, 1000000):
        await saved(tmp_path, step)
    found, _ = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.step == 1000000
