"""Transport `disk-delta` between real ends, and its command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from miles_core.cli import main
from miles_core.errors import TransportError
from miles_core.kinds.transport import FolderReceiver, Transport
from miles_core.testing.recording import RecordingOptions, write_example_checkpoint
from miles_core.testing.transport import TransportConformance
from miles_transports.delta.store import open_store
from miles_transports.delta.transport import DiskDeltaTransport
from miles_transports.options import DiskDeltaOptions


def options(folder: Path, **changes: Any) -> DiskDeltaOptions:
    return DiskDeltaOptions(
        **{
            "publish_dir": str(folder / "published"),
            "local_dir": str(folder / "local"),
            "timeout_s": 120,
            "visible_s": 60,
            **changes,
        }
    )


class Kit(TransportConformance):
    changes: dict[str, Any] = {}  # noqa: RUF012 -- a table, not state

    @pytest.fixture(autouse=True)
    def _folders(self, tmp_path: Path) -> None:
        self.folder = tmp_path
        self.model_path = str(write_example_checkpoint(tmp_path / "base"))

    def make(self) -> Transport:
        return DiskDeltaTransport(options(self.folder, **self.changes))


class TestXor(Kit):
    pass


class TestOverwriteWithSnapshotsInAnObjectStore(Kit):
    changes = {"encoding": "overwrite", "snapshot_every": 1, "keep": 2, "checksum": "blake3"}  # noqa: RUF012

    def make(self) -> Transport:
        url = f"memory://{self.folder}"
        return DiskDeltaTransport(options(self.folder, publish_dir=url, **self.changes))


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    made = Kit()
    made.folder = tmp_path
    made.model_path = str(write_example_checkpoint(tmp_path / "base", version=0))
    return made


async def test_equal_weights_publish_nothing_and_density_and_bytes_are_reported(kit: Kit) -> None:
    async with kit.connected() as connected:
        staged = await kit.publish(connected, 0)
        assert staged.sent.figures["density"] == 0
        assert await connected.engines[0].version() == -1
        staged = await kit.publish(connected, 1)
        assert 0 < staged.sent.figures["density"] <= 1
        assert staged.sent.figures["wire_bytes"] > 0
        assert {"encode_s", "write_s"} <= staged.sent.figures.keys()
        receiver = connected.engines[0]._receiver
        assert isinstance(receiver, FolderReceiver)


async def test_relative_folders_start_where_the_command_was_started(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    transport = DiskDeltaTransport(options(tmp_path, publish_dir="published", local_dir="local"))
    monkeypatch.chdir(tmp_path / "elsewhere")  # where another process of the run may be
    monkeypatch.setattr(kit, "make", lambda: transport)
    async with kit.connected() as connected:
        await kit.publish(connected, 1)
    assert list(tmp_path.glob("published/*/weight_v000001"))
    assert list(tmp_path.glob("local/*/v000001-*"))
    assert not list((tmp_path / "elsewhere").iterdir())


async def test_a_checkpoint_of_another_model_is_refused_before_training(kit: Kit, tmp_path: Path) -> None:
    kit.model_path = str(write_example_checkpoint(tmp_path / "other"))
    (tmp_path / "other" / "model-00002-of-00002.safetensors").unlink()
    async with kit.connected() as connected:
        error = await kit.refused(connected, 0)
        assert "not in the checkpoint" in str(error)


async def published_run(kit: Kit) -> str:
    async with kit.connected(options=RecordingOptions(fail_receive=(1, 2), fail_version=2)) as connected:
        for version in (0, 1):
            await kit.publish(connected, version)
        with pytest.raises(TransportError):
            await kit.publish(connected, 2)
        await kit.publish(connected, 3)
    return str(kit.folder / "published")


def invoke(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["delta", *arguments])
    assert result.exit_code == code, result.output
    return result.output


async def test_people_can_inspect_verify_and_apply_what_is_published(kit: Kit, tmp_path: Path) -> None:
    place = await published_run(kit)
    shown = invoke("inspect", place)
    assert "v000001  on checkpoint" in shown
    assert "v000003  on v000002" in shown
    assert "xor" in shown
    base = kit.model_path
    assert "ok  3 deltas up to v000003" in invoke("verify", place, "--base", base)
    for version in ("1", "3"):
        local = str(tmp_path / "mine")
        built = invoke("apply", place, "--base", base, "--local", local, "--version", version).strip()
        assert len(list(Path(built).glob("*.safetensors"))) == 2
    assert "not published" in invoke("apply", place, "--base", base, "--local", "x", "--version", "9", code=1)


async def test_verify_names_the_tensor_that_was_damaged(kit: Kit) -> None:
    place = await published_run(kit)
    (lineage,) = open_store(place).list("")
    shard = next((Path(place) / lineage / "weight_v000003").glob("*.safetensors"))
    raw = bytearray(shard.read_bytes())
    raw[-2] ^= 1
    shard.write_bytes(raw)
    assert "of version 3" in invoke("verify", place, "--base", kit.model_path, code=1)


async def test_with_several_lineages_one_must_be_named(kit: Kit) -> None:
    place = await published_run(kit)
    await published_run(kit)
    first, second = open_store(place).list("")
    assert "--lineage" in invoke("verify", place, "--base", kit.model_path, code=1)
    assert "ok" in invoke("verify", place, "--base", kit.model_path, "--lineage", first)
    assert second in invoke("inspect", place)
    assert "there is no lineage" in invoke("verify", place, "--base", kit.model_path, "--lineage", "nope", code=1)


def test_a_folder_without_versions_says_so(tmp_path: Path) -> None:
    assert "no version is published" in invoke("inspect", str(tmp_path))
    assert "no version is published" in invoke("verify", str(tmp_path), "--base", str(tmp_path), code=1)
