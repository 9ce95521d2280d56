"""Versions of the weights as folders: the one being received, and the one being served.

A version is a Hugging Face folder: safetensors files, several for each bucket, an index, and links to the checkpoint's
other files. The staged one becomes visible by a rename, after every tensor was judged and digested. The served one
stays until its successor serves: it is what a server that died is started with, and what a failed update goes back to.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path

import torch

from miles_core.errors import EngineError
from miles_core.types import NamedTensor, WeightBucket, WeightManifest
from miles_core.weights.digests import begin_digest, host_chunks
from miles_core.weights.intake import Intake
from miles_sglang.checkpoint import Checkpoint

SHARED_MEMORY = Path("/dev/shm")
WRITERS = 8
"""Threads, and files of a bucket, at most: one thread copies, digests and writes about 1 GB/s."""
SAFETENSORS_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def default_parent() -> Path:
    """Shared memory, else the temporary folder."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


class WeightStore:
    """Owns a private folder of versions, from `open` to `close`.

    Args:
        parent: Where to make it; None takes shared memory, else the temporary folder.
    """

    def __init__(self, checkpoint: Checkpoint, parent: str | None, where: str) -> None:
        self._checkpoint = checkpoint
        self._where = where
        self.root = Path(parent or default_parent()) / f"miles-sglang-{secrets.token_hex(6)}"
        self.served: Path | None = None
        """Folder of the version that is served; None while that is the checkpoint."""
        self.staged: tuple[int, Path] | None = None

    def open(self) -> None:
        """Make the folder.

        Raises:
            EngineError: it cannot be made.
        """
        try:
            self.root.mkdir(mode=0o700)
        except OSError as error:
            raise EngineError(
                "no folder for staged weights can be made",
                found=str(error),
                where=self._where,
                do="set engine.staging_dir to a folder that is there and that Miles may write to",
            ) from error

    def stage(self, version: int, buckets: Iterable[WeightBucket]) -> WeightManifest:
        """Write all buckets of a version beside the served one. Blocking.

        Raises:
            EngineError: the buckets are not exactly this version of exactly these weights, or there is no room for
            them; nothing is staged then.
        """
        self.drop_staged()
        partial = self.root / "partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        intake = Intake(version, self._checkpoint.forms, f"{self._where}, staging")
        digests: dict[str, str] = {}
        files: dict[str, str] = {}
        num_bytes = 0
        for bucket in buckets:
            intake.admit(bucket)
            num_bytes += sum(named.tensor.numel() * named.tensor.element_size() for named in bucket.tensors)
            try:
                for file, written in self._write(bucket, partial):
                    digests |= written
                    files |= dict.fromkeys(written, file)
            except OSError as error:
                raise self._full(partial, num_bytes, error) from error
        intake.finish()
        self._complete(partial, files, num_bytes)
        final = self.root / f"version_{version:06d}_{len(list(self.root.iterdir()))}"
        partial.rename(final)
        self.staged = (version, final)
        return WeightManifest(version=version, digests=digests, num_bytes=num_bytes)

    def _write(self, bucket: WeightBucket, folder: Path) -> list[tuple[str, dict[str, str]]]:
        """Write a bucket as files of about equal size at once; their names, and digests of what is in each."""
        shares = _shares(bucket.tensors, min(WRITERS, os.cpu_count() or 1))
        names = [f"model-{bucket.index + 1:05d}-{number}.safetensors" for number in range(len(shares))]
        with ThreadPoolExecutor(max(len(shares), 1), thread_name_prefix="miles-sglang-staging") as pool:
            written = pool.map(lambda name, share: write_file(folder / name, share), names, shares)
            return list(zip(names, written, strict=True))

    def _full(self, partial: Path, num_bytes: int, error: Exception) -> EngineError:
        """What could not be written, and room again: what lies in shared memory is memory that others lack."""
        shutil.rmtree(partial, ignore_errors=True)
        return EngineError(
            "a weight version cannot be staged",
            expected=f"room for two versions in {self.root.parent}",
            found=f"{error}, after {num_bytes / 2**20:.1f} MiB; "
            f"{shutil.disk_usage(self.root).free / 2**20:.1f} MiB are free without it",
            where=self._where,
            do="set engine.staging_dir to a folder with more room",
        )

    def commit(self) -> None:
        """The staged version is served now; the one before is deleted."""
        assert self.staged is not None
        before, self.served = self.served, self.staged[1]
        self.staged = None
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)

    def drop_staged(self) -> None:
        staged, self.staged = self.staged, None
        if staged is not None:
            shutil.rmtree(staged[1], ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    def _complete(self, folder: Path, files: dict[str, str], num_bytes: int) -> None:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        for file in self._checkpoint.path.iterdir():
            if file.is_file() and not file.name.startswith("model") and file.suffix not in (".safetensors", ".bin"):
                (folder / file.name).symlink_to(file.resolve())


def write_file(path: Path, tensors: Sequence[NamedTensor]) -> dict[str, str]:
    """Write a safetensors file, each tensor copied from its device once (huggingface.co/docs/safetensors, "Format").

    `safetensors.torch.save_file` copies every tensor twice more, and lets no other thread run meanwhile.

    Returns:
        Digest of each tensor that was written.

    Raises:
        OSError: it could not be written.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for named in tensors:
        begin, end = end, end + named.tensor.numel() * named.tensor.element_size()
        dtype = SAFETENSORS_DTYPES[named.tensor.dtype]
        header[named.name] = {"dtype": dtype, "shape": list(named.tensor.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    digests: dict[str, str] = {}
    with path.open("xb", buffering=0) as file:
        _write_all(file, memoryview(len(encoded).to_bytes(8, "little") + encoded))
        for named in tensors:
            digest = begin_digest(named.tensor)
            for chunk in host_chunks(named.tensor):
                digest.update(chunk)
                _write_all(file, chunk)
            digests[named.name] = digest.hexdigest()
    return digests


def _write_all(file: FileIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def _shares(tensors: Sequence[NamedTensor], count: int) -> list[list[NamedTensor]]:
    """Up to `count` lists of about equal bytes, none empty."""
    shares: list[list[NamedTensor]] = [[] for _ in range(min(count, len(tensors)))]
    sizes = [0] * len(shares)
    for named in sorted(tensors, key=lambda named: named.tensor.numel() * named.tensor.element_size(), reverse=True):
        least = sizes.index(min(sizes))
        shares[least].append(named)
        sizes[least] += named.tensor.numel() * named.tensor.element_size()
    return shares
