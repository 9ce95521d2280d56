"""The driver's side of disk-delta: which version builds on which, when one is complete, and when old ones go.

Ranks write shards and listings; only the index, written here after all of them are visible in full, publishes. A crash
before it leaves files that nobody reads, and the next attempt writes over them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

from miles_core.errors import TransportError
from miles_core.weights.digests import name_some
from miles_transports.delta import index
from miles_transports.delta.codec import Checksum, Encoding
from miles_transports.delta.index import BASE, CHECKPOINT, INDEX, Key, VersionIndex
from miles_transports.delta.store import Store, eventually


class Publication:
    """One lineage.

    Args:
        names: Every tensor of the checkpoint.
        snapshot_every: A full snapshot accompanies every so many versions; 0 is never.
        keep: Newest versions that stay whatever happens.
        visible_s: Seconds to wait until what ranks wrote is visible here.
    """

    def __init__(
        self,
        store: Store,
        lineage: str,
        *,
        names: Iterable[str],
        encoding: Encoding,
        kind: Checksum,
        snapshot_every: int,
        keep: int,
        visible_s: float,
    ) -> None:
        self._store, self.lineage = store, lineage
        self._names = frozenset(names)
        self._encoding: Encoding = encoding
        self._checksum: Checksum = kind
        self._snapshot_every, self._keep, self._visible_s = snapshot_every, keep, visible_s
        self._chain: list[VersionIndex] = []
        self._snapshots: list[int] = []  # versions with a full snapshot
        self._full = False

    @property
    def newest(self) -> Key:
        return self._chain[-1].key if self._chain else CHECKPOINT

    def begin(self, version: int) -> tuple[int, bool]:
        """Take back what an attempt at this version published that then failed on some engine.

        Returns:
            The version to compare with, and whether ranks also write a full snapshot.
        """
        while self._chain and self._chain[-1].version >= version:
            self._remove(self._chain.pop().version)
        self._snapshots = [each for each in self._snapshots if each < version]
        last = self._snapshots[-1] if self._snapshots else BASE
        since = sum(each.version > last for each in self._chain)
        self._full = 0 < self._snapshot_every <= since + 1
        return (self._chain[-1].version if self._chain else BASE), self._full

    def seal(self, version: int, names: Iterable[str], check: Callable[[], None] = lambda: None) -> Key:
        """Publish what the ranks wrote; nothing, where no byte has changed.

        Args:
            names: Every tensor that was exported.
            check: Called while waiting; raises when the version is not wanted any more.

        Returns:
            The newest published version.

        Raises:
            TransportError: a rank's files are not visible in time, ranks disagree, or a tensor is nobody's or missing.
        """
        expected = tuple(names)
        if missing := sorted(self._names - set(expected)):
            raise TransportError(
                "tensors of the checkpoint were not exported",
                expected=f"{len(self._names)} tensors",
                found=f"not {name_some(missing)}",
                do="pick another transport: disk-delta publishes the checkpoint's tensors",
            )
        sealed = self._index(version, expected, check, full=False)
        if not sealed.weight_map:
            self._remove(version)
            return self.newest
        if self._full:
            full = self._index(version, expected, check, full=True)
            self._store.write(f"{full.folder}/{INDEX}", [full.to_json()])
        self._store.write(f"{sealed.folder}/{INDEX}", [sealed.to_json()])
        self._snapshots += [version] if self._full else []
        self._chain.append(sealed)
        return self.newest

    def collect(self) -> None:
        """Remove versions that neither an engine nor a late joiner needs."""
        for old in index.garbage(self._store, self.lineage, self._keep):
            self._remove(old)

    def _index(self, version: int, names: Iterable[str], check: Callable[[], None], *, full: bool) -> VersionIndex:
        folder = index.folder_of(self.lineage, version, full=full)
        listings = [self._listing(folder, 0, check)]
        listings += [self._listing(folder, rank, check) for rank in range(1, listings[0].world_size)]
        base_version, base_digest = (version, "") if full else self.newest
        weight_map, content = index.merge_listings(listings, names, version)
        return VersionIndex(
            lineage=self.lineage,
            version=version,
            base_version=base_version,
            base_digest=base_digest,
            encoding="full" if full else self._encoding,
            checksum=self._checksum,
            content=content,
            weight_map=weight_map,
        )

    def _listing(self, folder: str, rank: int, check: Callable[[], None]) -> index.RankListing:
        name = index.listing_name(folder, rank)

        def read() -> index.RankListing:
            try:
                found = index.RankListing.from_json(self._store.read(name))
            except json.JSONDecodeError:
                raise FileNotFoundError(name) from None  # visible, but not all of it yet
            if found.shard is not None and self._store.size(f"{folder}/{found.shard}") != found.num_bytes:
                raise FileNotFoundError(found.shard)
            return found

        return eventually(read, name, self._visible_s, check)

    def _remove(self, version: int) -> None:
        folder = index.folder_of(self.lineage, version)
        for part in (f"{folder}/{INDEX}", f"{folder}/full/{INDEX}", folder):  # without an index nobody begins to read
            self._store.remove(part)
