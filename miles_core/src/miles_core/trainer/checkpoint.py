"""The trainer's state on disk, through torch.distributed.checkpoint; written by any number of ranks, read by any other.

    directory/
      .metadata, *.distcp   masters and AdamW moments, as DCP lays them out
      trainer.json          written last: what must be there, with sizes and digests, after how many updates

A directory is refused as half-written if it has no `trainer.json`, or if a file has another size than that says. It is
refused as damaged if a file has other bytes. Each rank digests what it writes, and a share of the files that are read.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from miles_core.errors import CheckpointError, damaged_checkpoint
from miles_core.weights.digests import digest_file

FORMAT = 2
MANIFEST = "trainer.json"
Part = TypeVar("Part")


def save(
    directory: Path, tensors: Mapping[str, Tensor], *, updates: int, described: Mapping[str, Tensor] | None = None
) -> None:
    """Write the state of all ranks. A collective when torch.distributed is initialised.

    Args:
        tensors: This rank's part: whole tensors, DTensors, or `trainer.chunk.Chunk`.
        described: Shape and dtype of every tensor over all ranks; None where every rank has all.

    Raises:
        CheckpointError: the disk is full or the folder cannot be written.
    """
    distributed = dist.is_initialized()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Any rank may do it: DCP writes only after all ranks have met.
        for old in (directory / MANIFEST, directory / ".metadata", *directory.glob("*.distcp")):
            old.unlink(missing_ok=True)
        with _one_process_is_meant():
            dcp_save(dict(tensors), storage_writer=FileSystemWriter(directory), no_dist=not distributed)
        files = _written(directory)
        if not distributed or dist.get_rank() == 0:
            _write_manifest(directory, tensors if described is None else described, updates, files)
    except (OSError, CheckpointException) as error:
        raise CheckpointError(
            "the trainer's state cannot be saved",
            expected="room for the checkpoint and the right to write it",
            found=_cause(error),
            where=str(directory),
            do="free disk space or choose another tracking.dir; older checkpoints are untouched",
        ) from error
    if distributed:
        meet()


def meet() -> None:
    """Wait for all ranks, over the device of this one: NCCL would have to guess it, and says so in a warning."""
    dist.barrier(device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)


def load(directory: Path, tensors: Mapping[str, Tensor], *, described: Mapping[str, Tensor] | None = None) -> int:
    """Fill `tensors` in place; return the number of optimizer steps taken. A collective like `save`.

    Raises:
        CheckpointError: absent, half written, damaged, or of another model.
    """
    manifest = _read_manifest(directory)
    wanted = tensors if described is None else described
    if manifest["state"] != _fingerprint(wanted):
        raise CheckpointError(
            "the checkpoint belongs to another model",
            expected=f"{len(wanted)} tensors with the names and shapes of this model",
            found=f"{manifest['count']} tensors, or other names or shapes",
            where=str(directory),
            do="resume with the run-file that wrote it, or start a new run",
        )
    _check_digests(directory, manifest["files"])
    try:
        with _one_process_is_meant():
            dcp_load(dict(tensors), storage_reader=_Reader(directory), no_dist=not dist.is_initialized())
    except (OSError, CheckpointException, pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        expected = "readable tensors of this model"
        raise damaged_checkpoint(directory, expected=expected, found=_cause(error)) from error
    return int(manifest["updates"])


@contextlib.contextmanager
def _one_process_is_meant() -> Iterator[None]:
    """Silence DCP's guess that somebody forgot to initialise torch.distributed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _written(directory: Path) -> dict[str, tuple[int, str]]:
    """Size and digest of every file of the checkpoint, each from the rank that wrote it. Collective."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    mine = [*directory.glob(f"__{rank}_*.distcp"), *([directory / ".metadata"] if rank == 0 else [])]
    found = _gathered({path.name: (path.stat().st_size, digest_file(path)) for path in mine})
    return {name: entry for part in found for name, entry in sorted(part.items())}


def _check_digests(directory: Path, files: Mapping[str, Any]) -> None:
    """Each rank digests its share of the files; all raise if one finds other bytes. Collective.

    This is a pass of its own: DCP then reads only the slices that a rank needs, which no digest covers.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    share = sorted(files)[rank::world]
    mine = [name for name in share if digest_file(directory / Path(name).name) != files[name][1]]
    damaged = [name for part in _gathered(mine) for name in part]
    if damaged:
        found = f"other bytes in {', '.join(damaged)}"
        raise damaged_checkpoint(directory, expected="the bytes that were saved", found=found)


def _gathered(mine: Part) -> list[Part]:
    if not dist.is_initialized():
        return [mine]
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return parts


def _write_manifest(
    directory: Path, tensors: Mapping[str, Tensor], updates: int, files: Mapping[str, tuple[int, str]]
) -> None:
    manifest = {
        "format": FORMAT,
        "updates": updates,
        "count": len(tensors),
        "state": _fingerprint(tensors),
        "files": dict(files),
    }
    with (directory / (MANIFEST + ".partial")).open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    (directory / (MANIFEST + ".partial")).rename(directory / MANIFEST)


def _read_manifest(directory: Path) -> dict[str, Any]:
    def refuse(found: str) -> CheckpointError:
        expected = f"a folder that `save` finished, with {MANIFEST} (format {FORMAT}) and every file it lists"
        return damaged_checkpoint(directory, expected=expected, found=found)

    try:
        manifest: dict[str, Any] = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        files = dict(manifest["files"])
        if manifest["format"] != FORMAT:
            raise refuse(f"format {manifest['format']}")
    except FileNotFoundError as error:
        raise refuse(f"no {MANIFEST}" if directory.is_dir() else "no such folder") from error
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise refuse(f"an unreadable {MANIFEST}") from error
    for name, (size, _) in files.items():
        path = directory / Path(name).name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            raise refuse(f"{name} has {found} bytes instead of {size}" if found is not None else f"no {name}")
    return manifest


def _fingerprint(tensors: Mapping[str, Tensor]) -> str:
    text = "\n".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in sorted(tensors.items()))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _cause(error: BaseException) -> str:
    """The first line of the innermost failure; DCP wraps one per rank."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (inner, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {type(inner).__name__}: {str(inner).splitlines()[0] if str(inner) else ''}"
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


# --- reading without trusting pickles ---------------------------------------------------------------------------------

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"},
}
"""What DCP's `.metadata` is made of, beside torch's dtypes: plain descriptions."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"refuses {module}.{name}, which no checkpoint needs")


class _Reader(FileSystemReader):
    """DCP's reader, whose one pickle (`.metadata`) may only build descriptions; it loads tensors with weights_only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        data = (Path(self.path) / ".metadata").read_bytes()
        metadata: Metadata = _Unpickler(io.BytesIO(data)).load()
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata
