"""The index of a published version: what makes it complete, what it builds on, where each change lies.

    <lineage>/weight_v000012/model-00001-of-00002.safetensors   changes of the tensors one trainer rank owns
    <lineage>/weight_v000012/rank-00000.json                    what that rank wrote and what it looked at
    <lineage>/weight_v000012/model.safetensors.index.json       written last: its presence marks a complete version
    <lineage>/weight_v000012/full/...                           the same for a snapshot of all bytes

A shard is a safetensors file whose tensors are u8[n] payloads under the names of the tensors they change; its metadata
maps each to the checksum of the *resulting* tensor. An index names its base and the digest of the base's index, so that
versions form a chain that cannot be patched from two runs. A lineage is one run's chain; version -1 is the checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import xxhash

from miles_core.errors import TransportError
from miles_core.weights.digests import name_some
from miles_transports.delta.codec import CHECKSUMS, ENCODINGS, Checksum, Encoding
from miles_transports.delta.store import Store, version_names

INDEX = "model.safetensors.index.json"
BASE = -1
"""Version of the checkpoint that everyone starts from."""
Key = tuple[int, str]
"""A version and the digest of its index."""
CHECKPOINT: Key = (BASE, "")
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
"""Names from an index become paths: nothing else is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionIndex:
    lineage: str
    version: int
    base_version: int
    """`BASE` for the checkpoint; of a full snapshot, which needs none, its own version."""
    base_digest: str
    """Digest of the base's index, empty for the checkpoint."""
    encoding: Encoding
    checksum: Checksum
    content: str
    """Digest of the checksums of all changed tensors: an index stands for bytes, not only for names."""
    weight_map: Mapping[str, str]
    """Changed tensor to shard."""

    def to_json(self) -> bytes:
        metadata = {
            "lineage": self.lineage,
            "version": self.version,
            "base_version": self.base_version,
            "base_digest": self.base_digest,
            "delta_encoding": self.encoding,
            "compression_format": "zstd",
            "checksum_format": self.checksum,
            "content": self.content,
        }
        return json.dumps(
            {"metadata": metadata, "weight_map": dict(sorted(self.weight_map.items()))}, indent=1
        ).encode()

    @property
    def digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(self.to_json())

    @property
    def key(self) -> Key:
        return self.version, self.digest

    @property
    def base(self) -> Key:
        return self.base_version, self.base_digest

    @property
    def full(self) -> bool:
        return self.encoding == "full"

    @property
    def folder(self) -> str:
        return folder_of(self.lineage, self.version, full=self.full)


def folder_of(lineage: str, version: int, *, full: bool = False) -> str:
    return f"{lineage}/weight_v{version:06d}" + ("/full" if full else "")


def parse(raw: bytes, where: str) -> VersionIndex:
    """Read an index; names in it are checked before they are used as paths.

    Raises:
        TransportError: it is not an index of this format.
    """
    try:
        tree = json.loads(raw)
        metadata, weight_map = tree["metadata"], tree["weight_map"]
        encoding, checksum = metadata["delta_encoding"], metadata["checksum_format"]
        if metadata["compression_format"] != "zstd" or encoding not in ENCODINGS or checksum not in CHECKSUMS:
            raise ValueError(f"{metadata['compression_format']}, {encoding}, {checksum}")
        bad = [shard for shard in weight_map.values() if not _SHARD.fullmatch(shard)]
        if bad:
            raise ValueError(f"shard {bad[0]!r}")
        return VersionIndex(
            lineage=str(metadata["lineage"]),
            version=int(metadata["version"]),
            base_version=int(metadata["base_version"]),
            base_digest=str(metadata["base_digest"]),
            encoding=cast(Encoding, encoding),
            checksum=cast(Checksum, checksum),
            content=str(metadata["content"]),
            weight_map=weight_map,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TransportError(
            "an index of a published version cannot be read", found=f"{type(error).__name__}: {error}", where=where
        ) from error


def read_index(store: Store, lineage: str, version: int, *, full: bool = False) -> VersionIndex:
    """The index of a complete version.

    Raises:
        FileNotFoundError: that version is not published (completely), or not visible here yet.
        TransportError: what is there is another version's.
    """
    name = f"{folder_of(lineage, version, full=full)}/{INDEX}"
    index = parse(store.read(name), name)
    if (index.lineage, index.version, index.full) != (lineage, version, full):
        raise TransportError(
            "an index lies where another belongs",
            expected=f"version {version} of lineage {lineage}",
            found=f"version {index.version} of lineage {index.lineage}",
            where=name,
        )
    return index


@dataclass(frozen=True, slots=True, kw_only=True)
class RankListing:
    """What one trainer rank wrote of a version, and which tensors it answers for."""

    rank: int
    world_size: int
    shard: str | None
    num_bytes: int
    """Of the shard file."""
    changed: Mapping[str, str]
    """Tensor to checksum of the result."""
    owned: tuple[str, ...]

    def to_json(self) -> bytes:
        return json.dumps({name: getattr(self, name) for name in self.__slots__}).encode()

    @staticmethod
    def from_json(raw: bytes) -> RankListing:
        fields = json.loads(raw)
        return RankListing(**{**fields, "owned": tuple(fields["owned"])})


def listing_name(folder: str, rank: int) -> str:
    return f"{folder}/rank-{rank:05d}.json"


def merge_listings(
    listings: Iterable[RankListing], expected: Iterable[str], version: int
) -> tuple[dict[str, str], str]:
    """Tensor to shard over all ranks, and `VersionIndex.content`; of a tensor that several changed alike the lowest
    rank's counts.

    Args:
        expected: Every tensor of the model; each must be some rank's.

    Raises:
        TransportError: ranks disagree on a tensor, or nobody looked at one.
    """
    weight_map: dict[str, str] = {}
    checksums: dict[str, str] = {}
    owned: set[str] = set()
    conflicts: set[str] = set()
    for listing in sorted(listings, key=lambda listing: listing.rank):
        conflicts |= {
            name for name in listing.owned if name in owned and checksums.get(name) != listing.changed.get(name)
        }
        owned.update(listing.owned)
        for name, checksum in listing.changed.items():
            if name not in weight_map and listing.shard is not None:
                weight_map[name], checksums[name] = listing.shard, checksum
    lost = sorted(set(expected) - owned)
    if conflicts or lost:
        raise TransportError(
            f"version {version} cannot be published",
            expected="every tensor from some rank, and the same bytes from all that hold it",
            found=f"conflicting: {name_some(sorted(conflicts))}" if conflicts else f"from nobody: {name_some(lost)}",
            do="look for an update that one rank skipped",
        )
    lines = "".join(f"{name} {checksums[name]}\n" for name in sorted(checksums))
    return weight_map, xxhash.xxh3_128_hexdigest(lines.encode())


def garbage(store: Store, lineage: str, keep: int) -> list[int]:
    """Versions that nobody needs any more.

    The newest `keep` stay, and all back to the newest full snapshot at or before them, from which a late joiner starts.
    Without one the chain hangs on the checkpoint and all of it stays.
    """
    versions = list(version_names(store.list(lineage)))
    kept = versions[-keep:]
    snapshots = [v for v in versions if kept and v <= kept[0] and "full" in store.list(folder_of(lineage, v))]
    complete = [v for v in snapshots if INDEX in store.list(folder_of(lineage, v, full=True))]
    return [version for version in versions if version < complete[-1]] if complete else []
