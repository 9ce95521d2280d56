"""Writes and reads the checkpoints of a run; each is either complete or absent.

    checkpoints/step_000012/
        driver.json      step, data cursor, version, metrics of the step (everything the driver itself must remember)
        backend/         written by the backend's ranks
        groups/          finished groups that wait to be trained, where sampling and training overlap
        manifest.json    every file with its size, those of the driver with a digest; written last

A checkpoint is written to ``step_000012.partial``, which is renamed when everything is on disk. So a directory without
``.partial`` was complete once. If it was copied in part or truncated later, the manifest shows it. A half-written
checkpoint is never loaded.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.errors import CheckpointError, damaged_checkpoint
from miles_core.weights.digests import digest_file

FORMAT = 1
_NAME = re.compile(r"^step_(\d{6,})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    step: int
    path: Path
    state: Mapping[str, Any]
    """What the driver stored, as JSON values."""

    @property
    def backend_dir(self) -> Path:
        return self.path / "backend"

    @property
    def groups_dir(self) -> Path:
        return self.path / "groups"


async def save(
    root: Path,
    step: int,
    state: Mapping[str, Any],
    write_backend: Callable[[Path], Awaitable[None]],
    *,
    keep: int | None,
    write_groups: Callable[[Path], None] | None = None,
) -> Path:
    """Write the checkpoint of `step`, and then remove old ones beyond `keep`.

    Raises:
        CheckpointError: it could not be written; earlier checkpoints are untouched and the partial one is gone.
    """
    final = root / f"step_{step:06d}"
    partial = root / f"{final.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "backend").mkdir(parents=True)
        if write_groups is not None:  # before anything is awaited: state and groups are of one moment
            write_groups(partial / "groups")
        await write_backend(partial / "backend")
        _write_json(partial / "driver.json", {"format": FORMAT, "step": step, "state": dict(state)})
        _write_json(partial / "manifest.json", {"files": _sizes(partial), "digests": _digests(partial)})
        _sync_tree(partial)
        if final.exists():  # the same step again, after a resume from an older checkpoint
            shutil.rmtree(final)
        partial.rename(final)
        _sync_directory(root)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise _save_error(final, error) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _prune(root, keep)
    return final


def newest(root: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest complete checkpoint under `root`, and a line for each newer one that was passed over."""
    passed_over: list[str] = []
    for path in _complete_names(root):
        try:
            return load(path), passed_over
        except CheckpointError as error:
            passed_over.append(f"{path.name}: {error.message} ({error.found})")
    return None, passed_over


def load(path: Path) -> Checkpoint:
    """Read and verify one checkpoint directory.

    Raises:
        CheckpointError: a file is missing, of another size, damaged, or of a newer format.
    """
    if path.name.endswith(".partial"):
        raise damaged_checkpoint(path, expected="a folder that was renamed when it was complete", found=path.name)
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        files, digests = manifest["files"], manifest["digests"]
        driver = json.loads((path / "driver.json").read_text())
    except (OSError, ValueError, KeyError) as error:
        found = f"{type(error).__name__}: {error}"
        raise damaged_checkpoint(path, expected="manifest.json and driver.json", found=found) from error
    sizes = _sizes(path)
    for name, size in files.items():
        if sizes.get(name) != size:
            has = f"{name} has {sizes[name]} bytes" if name in sizes else f"no {name}"
            raise damaged_checkpoint(path, expected=f"{name} with {size} bytes", found=has)
    if changed := [name for name, digest in _digests(path).items() if digests.get(name) != digest]:
        found = f"other bytes in {', '.join(changed)}"
        raise damaged_checkpoint(path, expected="the bytes that were saved", found=found)
    if driver["format"] != FORMAT:
        raise CheckpointError(
            "checkpoint of another format", expected=str(FORMAT), found=str(driver["format"]), where=str(path)
        )
    return Checkpoint(step=driver["step"], path=path, state=driver["state"])


def _complete_names(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    named = [(int(match[1]), path) for path in root.iterdir() if (match := _NAME.match(path.name))]
    return [path for _, path in sorted(named, reverse=True)]


def _prune(root: Path, keep: int | None) -> None:
    for path in _complete_names(root)[keep:] if keep is not None else []:
        shutil.rmtree(path, ignore_errors=True)


def _sizes(path: Path) -> dict[str, int]:
    return {
        str(file.relative_to(path)): file.stat().st_size
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name != "manifest.json"
    }


def _digests(path: Path) -> dict[str, str]:
    """xxh3-128 of the driver's own files; the ranks of the backend check theirs, as they read them."""
    return {name: digest_file(path / name) for name in _sizes(path) if not name.startswith("backend/")}


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True))


def _sync_tree(path: Path) -> None:
    for file in path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        else:
            _sync_directory(file)
    _sync_directory(path)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _save_error(path: Path, error: OSError) -> CheckpointError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    free = shutil.disk_usage(path.parent).free // 2**20
    return CheckpointError(
        "the disk is full; the checkpoint was not saved" if full else f"the checkpoint was not saved ({error})",
        found=f"{free} MiB free",
        where=str(path),
        do="free space or lower checkpoint.keep, then continue with --resume; earlier checkpoints are intact",
    )
