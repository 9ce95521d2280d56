"""Versions of the weights as folders: the one being received, and the one being served.

A version is a Hugging Face folder: a safetensors file for each bucket, an index, and links to the checkpoint's other
files. The staged one becomes visible by a rename, after every tensor was judged and digested. The served one stays
until its successor serves: it is what a server that died is started with, and what a failed update goes back to.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from miles_core.errors import EngineError
from miles_core.types import WeightBucket, WeightManifest
from miles_core.weights.digests import digest_tensor
from miles_core.weights.intake import Intake
from miles_sglang.checkpoint import Checkpoint

SHARED_MEMORY = Path("/dev/shm")


class WeightStore:
    """Owns a private folder of versions.

    Args:
        parent: Where to make it; None takes shared memory, else the temporary folder.
    """

    def __init__(self, checkpoint: Checkpoint, parent: str | None, where: str) -> None:
        self._checkpoint = checkpoint
        self._where = where
        default = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        try:
            self.root = Path(tempfile.mkdtemp(prefix="miles-sglang-", dir=parent or default))
        except OSError as error:
            raise EngineError(
                "no folder for staged weights can be made",
                found=str(error),
                where=where,
                do="set engine.staging_dir to a folder that is there and that Miles may write to",
            ) from error
        self.served: Path | None = None
        """Folder of the version that is served; None while that is the checkpoint."""
        self.staged: tuple[int, Path] | None = None

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
            name = f"model-{bucket.index + 1:05d}.safetensors"
            tensors = {named.name: _dense(named.tensor) for named in bucket.tensors}
            for key, tensor in tensors.items():
                digests[key] = digest_tensor(tensor)
                files[key] = name
                num_bytes += tensor.numel() * tensor.element_size()
            try:
                save_file(tensors, partial / name, metadata={"format": "pt"})
            except (OSError, SafetensorError) as error:
                raise self._full(partial, num_bytes, error) from error
        intake.finish()
        self._complete(partial, files, num_bytes)
        final = self.root / f"version_{version:06d}_{len(list(self.root.iterdir()))}"
        partial.rename(final)
        self.staged = (version, final)
        return WeightManifest(version=version, digests=digests, num_bytes=num_bytes)

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


def _dense(tensor: Tensor) -> Tensor:
    """On the CPU, contiguous, in a storage of its own: the format refuses tensors that share one, and buckets often are
    views of one block."""
    host = tensor.detach().to("cpu").contiguous()
    alone = host.untyped_storage().nbytes() == host.numel() * host.element_size()
    return host if alone else host.clone()
