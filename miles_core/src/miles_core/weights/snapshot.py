"""Snapshots: the weights of one step as a Hugging Face folder, which engines load while the trainer continues.

A snapshot is ready once its marker is there; the marker says which step it holds. `SnapshotTransport` stages a snapshot
on engines like any other weight version: what each engine received is compared with what the files hold.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from miles_core.errors import TransportError
from miles_core.kinds.engine import Engine
from miles_core.kinds.transport import Staged
from miles_core.types import NamedTensor, WeightBucket, WeightManifest
from miles_core.weights.buckets import fill_buckets, plan_buckets
from miles_core.weights.digests import manifest

MARKER = "SNAPSHOT.json"
BUCKET_BYTES = 512 * 2**20
HEADER_LENGTH_BYTES = 8


def folder_of(root: Path, step: int) -> Path:
    return root / f"step_{step:06d}"


async def write(root: Path, step: int, export: Callable[[Path], Awaitable[None]]) -> Path:
    """Export the weights of `step`, then mark the folder ready."""
    folder = folder_of(root, step)
    await export(folder)
    partial = folder / f"{MARKER}.partial"
    partial.write_text(json.dumps({"step": step}) + "\n", encoding="utf-8")
    partial.rename(folder / MARKER)
    return folder


def step_of(folder: Path) -> int | None:
    """The step whose weights a folder holds; None if it is not ready."""
    try:
        return int(json.loads((folder / MARKER).read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError):
        return None


class SnapshotReceiver:
    """The engine's end: reads version `step` from the folder of that step (a `FolderReceiver`)."""

    def __init__(self, root: str) -> None:
        self._root = Path(root)

    def receive(self, version: int) -> Iterator[WeightBucket]:
        """The snapshot's tensors in bounded buckets.

        Raises:
            TransportError: the snapshot is absent or not ready.
        """
        from safetensors import safe_open

        files = sorted(self.materialise(version).glob("*.safetensors"))
        where = {name: file for file in files for name in tensor_bytes(file)}
        sizes = {name: size for file in files for name, size in tensor_bytes(file).items()}
        with ExitStack() as stack:
            opened = {file: stack.enter_context(safe_open(file, framework="pt")) for file in files}
            yield from fill_buckets(
                plan_buckets(sizes, BUCKET_BYTES), lambda name: opened[where[name]].get_tensor(name), version
            )

    def materialise(self, version: int) -> Path:
        """The snapshot's folder; it stays until its evaluation is over.

        Raises:
            TransportError: it is absent, not ready, or holds another step.
        """
        folder = folder_of(self._root, version)
        if (found := step_of(folder)) != version:
            raise TransportError(
                "there is no snapshot to load",
                expected=f"a ready snapshot of step {version}",
                found="none" if found is None else f"one of step {found}",
                where=str(folder),
                do="give every host the run directory at the same path",
            )
        return folder

    def close(self) -> None: ...


class SnapshotTransport:
    """The driver's end, joined to no trainer.

    Args:
        root: Folder of the snapshots, at the same path on every host.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._engines: tuple[Engine, ...] = ()

    async def open(self, source: object, engines: Sequence[Engine]) -> None:
        """Give each engine its receiving end; the trainer gets none."""
        make = functools.partial(SnapshotReceiver, str(self._root))
        await asyncio.gather(*(engine.open_receiver(make) for engine in engines))
        self._engines = tuple(engines)

    async def publish(self, version: int) -> Staged:
        """Stage the snapshot of step `version` on every engine. The manifest is that of the files."""
        sent = asyncio.to_thread(self._account, version)
        receiving = (engine.receive(version) for engine in self._engines)
        account, *received = await asyncio.gather(sent, *receiving)
        return Staged(sent=account, received=tuple(received))

    def _account(self, version: int) -> WeightManifest:
        def tensors() -> Iterator[NamedTensor]:
            for bucket in SnapshotReceiver(str(self._root)).receive(version):
                yield from bucket.tensors

        return manifest(version, tensors())

    async def close(self) -> None: ...


def tensor_bytes(file: Path) -> Mapping[str, int]:
    """Bytes of each tensor of a safetensors file, from its header."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(HEADER_LENGTH_BYTES), "little")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    return {name: facts["data_offsets"][1] - facts["data_offsets"][0] for name, facts in header.items()}
