"""A trainer's checkpoint is whole or refused, and reading one runs nobody's code."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch

from miles_core.errors import CheckpointError
from miles_core.trainer import checkpoint
from miles_core.weights.digests import digest_file


def state(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"a.master": torch.full((3, 2), value), "b.master": torch.full((4,), value, dtype=torch.bfloat16)}


def test_a_round_trip_keeps_every_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved = {"a": torch.randn(5, 3), "b": torch.randn(4).bfloat16(), "c": torch.zeros(0)}
    checkpoint.save(tmp_path, saved, updates=7)
    found = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    assert checkpoint.load(tmp_path, found) == 7
    assert all(torch.equal(found[name], saved[name]) for name in saved)


def test_saving_again_replaces_the_older_state(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, state(1.0), updates=1)
    checkpoint.save(tmp_path, state(2.0), updates=2)
    found = state(0.0)
    assert checkpoint.load(tmp_path, found) == 2
    assert torch.equal(found["a.master"], state(2.0)["a.master"])


@pytest.mark.parametrize(
    "other",
    [
        {"a.master": torch.zeros(3, 2)},
        {**state(), "c.master": torch.zeros(1)},
        {"a.master": torch.zeros(2, 3), "b.master": torch.zeros(4, dtype=torch.bfloat16)},
        {"a.master": torch.zeros(3, 2), "b.master": torch.zeros(4)},
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, other: dict[str, torch.Tensor]) -> None:
    checkpoint.save(tmp_path, state(), updates=1)
    with pytest.raises(CheckpointError, match="another model"):
        checkpoint.load(tmp_path, other)


def test_another_format_is_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, state(), updates=1)
    manifest = tmp_path / checkpoint.MANIFEST
    manifest.write_text(manifest.read_text().replace(f'"format": {checkpoint.FORMAT}', '"format": 99'))
    with pytest.raises(CheckpointError, match="format 99"):
        checkpoint.load(tmp_path, state())


class Explosive:
    def __reduce__(self):
        return os.system, ("touch exploded",)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "state"
    checkpoint.save(folder, state(), updates=1)
    bomb = pickle.dumps(Explosive())
    whole = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(bomb.ljust(len(whole), b"\0"))
    with pytest.raises(CheckpointError, match=r"other bytes in \.metadata"):
        checkpoint.load(folder, state())
    # Whoever can write the folder can also write its digests.
    manifest = json.loads((folder / checkpoint.MANIFEST).read_text())
    manifest["files"][".metadata"][1] = digest_file(folder / ".metadata")
    (folder / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"refuses \w+\.system"):
        checkpoint.load(folder, state())
    assert not (tmp_path / "exploded").exists()


def test_a_manifest_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    checkpoint.save(folder, state(), updates=1)
    (tmp_path / "secret").write_text("x")
    manifest = folder / checkpoint.MANIFEST
    manifest.write_text(manifest.read_text().replace('"files": {', '"files": {"../secret": [1, "0"], '))
    with pytest.raises(CheckpointError, match=r"no \.\./secret"):
        checkpoint.load(folder, state())


def test_a_flipped_bit_in_the_weights_is_found(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, state(), updates=1)
    file = next(tmp_path.glob("*.distcp"))
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=f"other bytes in {file.name}"):
        checkpoint.load(tmp_path, state())


def test_a_full_disk_is_a_checkpoint_error_that_leaves_no_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_write_manifest", full)
    with pytest.raises(CheckpointError, match="No space left"):
        checkpoint.save(tmp_path, state(), updates=1)
    with pytest.raises(CheckpointError, match="half-written"):
        checkpoint.load(tmp_path, state())
