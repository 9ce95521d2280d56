"""Digests of tensors, by which two sides find out that they hold the same weights without exchanging them.

A digest covers dtype, shape and bytes. So a transposed, viewed or rounded tensor differs, even if its bytes or its
values happen to agree. Names are those that `save_pretrained` would write. xxh3-128 is not a cryptographic hash: it
finds mistakes, at the speed of memory, between parties that trust one another.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from miles_core.errors import TransportError
from miles_core.types import NamedTensor, WeightManifest

if TYPE_CHECKING:
    from torch import Tensor

NAMES_SHOWN = 8
"""Names listed in a message before it says how many more there are."""


THREADS = 8
"""Tensors digested at once at most: one thread copies from a GPU and hashes about 4 GB/s."""
FEW_BYTES = 8 * 2**20
"""Below it threads cost more than they save."""
MANIFEST_STRIDE = 64
"""Tensors that a manifest takes from its source at once."""
CHUNK_BYTES = 32 * 2**20
"""Pinned host memory that one thread copies a GPU's tensor through."""


def digest_file(path: Path) -> str:
    """xxh3-128 of a file's bytes, as 32 hexadecimal characters."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def digest_tensor(tensor: Tensor) -> str:
    """Digest of one tensor, on any device and in any layout.

    Returns:
        32 hexadecimal characters: xxh3-128 of dtype, shape and the row-major bytes.
    """
    digest = begin_digest(tensor)
    for chunk in host_chunks(tensor):
        digest.update(chunk)
    return digest.hexdigest()


def begin_digest(tensor: Tensor) -> xxhash.xxh3_128:
    """The digest of a tensor before its bytes: `host_chunks` gives those."""
    return xxhash.xxh3_128(f"{tensor.dtype}|{tuple(tensor.shape)}|".encode())


def host_chunks(tensor: Tensor) -> Iterator[memoryview]:
    """A tensor's row-major bytes in main memory; each chunk holds until the next is asked for."""
    import torch

    # uint8 views work for every dtype, bfloat16 and float8 included; a 0-dimensional tensor has no last axis to view.
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.device.type == "cpu":
        yield flat.numpy().data
        return
    buffer = torch.empty(min(len(flat), CHUNK_BYTES), dtype=torch.uint8, pin_memory=flat.device.type == "cuda")
    for start in range(0, len(flat), CHUNK_BYTES):
        piece = flat[start : start + CHUNK_BYTES]
        yield buffer[: len(piece)].copy_(piece).numpy().data


def digest_tensors(tensors: Sequence[NamedTensor]) -> dict[str, str]:
    """Digest several tensors at once.

    Raises:
        ValueError: a name comes twice.
    """
    if again := [name for name, count in Counter(named.name for named in tensors).items() if count > 1]:
        raise ValueError(f"tensor {again[0]!r} comes twice")
    threads = min(THREADS, os.cpu_count() or 1, len(tensors))
    if threads < 2 or sum(named.tensor.nbytes for named in tensors) < FEW_BYTES:
        return {named.name: digest_tensor(named.tensor) for named in tensors}
    _wait_for_devices(tensors)
    with ThreadPoolExecutor(threads, thread_name_prefix="miles-digests") as pool:
        digests = pool.map(digest_tensor, (named.tensor for named in tensors))
        return dict(zip((named.name for named in tensors), digests, strict=True))


def _wait_for_devices(tensors: Sequence[NamedTensor]) -> None:
    """Other threads copy in streams of their own, which know nothing of what this one still computes."""
    import torch

    for device in {named.tensor.device for named in tensors}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def manifest(version: int, tensors: Iterable[NamedTensor]) -> WeightManifest:
    """Digest every tensor of a weight version.

    Raises:
        ValueError: a name comes twice.
    """
    digests: dict[str, str] = {}
    num_bytes = 0
    rest = iter(tensors)
    while some := list(itertools.islice(rest, MANIFEST_STRIDE)):
        found = digest_tensors(some)
        if again := digests.keys() & found.keys():
            raise ValueError(f"tensor {min(again)!r} comes twice in version {version}")
        digests |= found
        num_bytes += sum(named.tensor.nbytes for named in some)
    return WeightManifest(version=version, digests=digests, num_bytes=num_bytes)


def merge_manifests(parts: Sequence[WeightManifest]) -> WeightManifest:
    """Join what several sources sent of one version. A tensor that several of them hold (a replicated one) counts once.

    Returns:
        The manifest of the whole version. Each figure is the largest of any source. Figures in bytes are summed, and so
        is the size, since each source counts its own share.

    Raises:
        TransportError: sources are at different versions, or hold different values of one tensor.
    """
    versions = sorted({part.version for part in parts})
    if len(versions) != 1:
        raise TransportError(
            "the sources sent different versions", expected="one version", found=", ".join(map(str, versions)) or "none"
        )
    digests: dict[str, str] = {}
    conflicts: set[str] = set()
    for part in parts:
        conflicts |= {name for name, digest in part.digests.items() if digests.get(name, digest) != digest}
        digests = {**part.digests, **digests}
    if conflicts:
        raise TransportError(
            f"trainer ranks hold different values of one tensor in version {versions[0]}",
            expected="replicated tensors equal on all ranks, bit for bit",
            found=name_some(sorted(conflicts)),
            do="look for an update that one rank skipped; the version was not published",
        )
    figures: dict[str, float] = {}
    for part in parts:
        for name, value in part.figures.items():
            before = figures.get(name)
            if before is None:
                figures[name] = value
            else:
                figures[name] = before + value if name.endswith("_bytes") else max(before, value)
    num_bytes = sum(part.num_bytes for part in parts)
    return WeightManifest(version=versions[0], digests=digests, num_bytes=num_bytes, figures=figures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """How two sets of digests differ. Falsy if they are equal."""

    missing: tuple[str, ...]
    """Expected but not found."""
    unexpected: tuple[str, ...]
    """Found but not expected."""
    changed: tuple[str, ...]
    """Found with another dtype, shape or other bytes."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.changed)

    def __str__(self) -> str:
        parts = [("missing", self.missing), ("unexpected", self.unexpected), ("different", self.changed)]
        return "; ".join(f"{len(names)} {label}: {name_some(names)}" for label, names in parts if names) or "equal"


def compare(expected: Mapping[str, str], found: Mapping[str, str]) -> Differences:
    """Compare two mappings of tensor name to digest; names come back sorted."""
    return Differences(
        missing=tuple(sorted(expected.keys() - found.keys())),
        unexpected=tuple(sorted(found.keys() - expected.keys())),
        changed=tuple(sorted(name for name in expected.keys() & found.keys() if expected[name] != found[name])),
    )


def name_some(names: Iterable[str]) -> str:
    """The first names, separated by commas, and how many more there are."""
    listed = list(names)
    shown = ", ".join(listed[:NAMES_SHOWN])
    return shown if len(listed) <= NAMES_SHOWN else f"{shown} and {len(listed) - NAMES_SHOWN} more"
