"""A chain of published versions, and one tensor's way through it.

Hosts walk it to build their copies, and trainer ranks whose connection is new to find the bytes published last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from miles_core.errors import TransportError
from miles_transports.delta import codec, index, tensorfile
from miles_transports.delta.codec import Pieces
from miles_transports.delta.index import BASE, CHECKPOINT, Key, VersionIndex
from miles_transports.delta.store import Store, eventually

Check = Callable[[], None]


def ways(
    store: Store, lineage: str, last: VersionIndex, is_here: Callable[[Key], bool]
) -> Iterator[tuple[Key, Sequence[VersionIndex]]]:
    """Ways to a version: a start that `is_here` and the indexes to apply in turn, cheapest first.

    A full snapshot starts from the checkpoint too: it gives names and places, and every byte is the snapshot's.

    Raises:
        TransportError: what is published does not form one chain.
    """
    chain = [last]
    while True:
        first = chain[0]
        if is_here(first.base):
            yield first.base, tuple(chain)
        if (full := _read(store, lineage, first.version, full=True)) is not None:
            yield CHECKPOINT, (full, *chain[1:])
        base = _read(store, lineage, first.base_version)
        if base is None:
            return
        _linked(base, first)
        chain.insert(0, base)


def _read(store: Store, lineage: str, version: int, *, full: bool = False) -> VersionIndex | None:
    try:
        return index.read_index(store, lineage, version, full=full) if version != BASE else None
    except FileNotFoundError:
        return None


def _linked(base: VersionIndex, following: VersionIndex) -> None:
    if base.digest != following.base_digest:
        raise TransportError(
            "published versions do not form one chain",
            expected=f"version {following.version} built on index {following.base_digest}",
            found=f"version {base.version} with index {base.digest}",
            do="two runs may publish into one lineage; give each its own folder",
        )


class ChecksumMismatch(TransportError):
    """Applying a delta did not give the tensor that was published."""


class Changes:
    """The changes of a chain of versions, by tensor."""

    def __init__(self, store: Store, chain: Sequence[VersionIndex], timeout_s: float, check: Check) -> None:
        self._store, self._chain, self._timeout_s, self._check = store, chain, timeout_s, check
        self._headers: dict[str, tensorfile.Header] = {}
        self.names = {name for each in chain for name in each.weight_map}

    def apply(self, source: tensorfile.Folder, name: str) -> Pieces:
        """Take one tensor through all versions, piece by piece; what each gives is checked at its end.

        Raises:
            ChecksumMismatch: a version did not give what was published; perhaps after some pieces.
        """
        self._check()
        entry, pieces = source.entry(name), source.pieces(name)
        for each in self._chain:
            if (shard := each.weight_map.get(name)) is not None:
                pieces = self._step(pieces, each, f"{each.folder}/{shard}", name, entry)
        return pieces

    def _step(self, pieces: Pieces, each: VersionIndex, path: str, name: str, of: tensorfile.Entry) -> Pieces:
        header = self._header(path)
        entry = header.entries.get(name)
        if entry is None:
            raise ChecksumMismatch(f"{path} lacks tensor {name}")
        payload = eventually(
            lambda: self._store.read(path, entry.start, entry.num_bytes), path, self._timeout_s, self._check
        )
        result = codec.hasher(each.checksum)
        try:
            for start, piece in codec.apply_pieces(pieces, of.num_bytes, payload, each.encoding, of.element_bytes):
                result.update(piece.data)
                yield start, piece
        except codec.Damaged as error:
            raise ChecksumMismatch(f"tensor {name} of version {each.version}: {error.found}") from error
        if (found := result.hexdigest()) != (expected := header.metadata.get(name)):
            raise ChecksumMismatch(
                f"tensor {name} of version {each.version} has checksum {found}, published was {expected}"
            )

    def _header(self, path: str) -> tensorfile.Header:
        if path not in self._headers:
            self._headers[path] = eventually(
                lambda: tensorfile.read_header(lambda start, length: self._store.read(path, start, length), path),
                path,
                self._timeout_s,
                self._check,
            )
        return self._headers[path]
