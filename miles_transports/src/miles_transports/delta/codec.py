"""What changed between two byte strings of one length, and how to apply it. Pure; knows nothing of files or tensors.

    xor        old XOR new, as long as the tensor; unchanged bytes are zeros, which compress to almost nothing.
               Applying it twice gives the old bytes again, so the result must be checked against its checksum.
    overwrite  u32 count, u32 positions[count] in elements, ascending, then the new elements; little-endian. Idempotent.
    full       the new bytes themselves; needs no base.

Every payload is a row of zstd frames (level 1), one for each `PIECE_BYTES`: a piece is compared, compressed and hashed
while it lies in the cache, which costs half of what three passes over the tensor do.
"""

from __future__ import annotations

import functools
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from miles_core.errors import TransportError
from miles_transports.memory import fresh

Bytes = npt.NDArray[np.uint8]
Encoding = Literal["xor", "overwrite", "full"]
Checksum = Literal["xxh3-128", "blake3", "adler32"]

ENCODINGS: tuple[Encoding, ...] = ("xor", "overwrite", "full")
CHECKSUMS: tuple[Checksum, ...] = ("xxh3-128", "blake3", "adler32")
LEVEL = 1
"""Deltas are mostly zeros or sorted positions; higher levels cost time and gain a few per cent."""
PIECE_BYTES = 2**17
"""Old, new and difference of a piece fit into a core's own cache."""
_MAX_ELEMENTS = 2**32
_WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Damaged(TransportError):
    """A payload cannot be applied: not of this encoding, or not of this tensor."""


@dataclass(frozen=True, slots=True)
class Delta:
    """One tensor's change."""

    payload: bytes
    """Compressed."""
    changed_bytes: int


@dataclass(frozen=True, slots=True)
class Advanced:
    """One tensor's change, and the memory that now holds its new bytes."""

    delta: Delta
    checksum: str
    held: Bytes


Pieces = Iterator[tuple[int, Bytes]]
"""Where each begins, and its bytes, in memory that the next one may overwrite."""


def advance(old: Bytes, new: Bytes, kind: Checksum) -> Advanced | None:
    """Encode as `xor`, and move `old` forward in place; the checkpoint's own bytes, read-only, get memory instead.

    Args:
        old, new: u8[n], equally long.

    Returns:
        None where nothing changed.

    Raises:
        TransportError: lengths differ.
    """
    _same_size(old, new)
    tools, frames, hashed = _tools, list[bytes](), hasher(kind)
    held, changed = old, 0
    for start in range(0, new.size, PIECE_BYTES):
        source = new[start : start + PIECE_BYTES]
        piece = tools.scratch[: source.size]
        np.bitwise_xor(old[start : start + PIECE_BYTES], source, out=piece)
        count = int(np.count_nonzero(piece))
        if count and not changed:  # all before was equal, and cost no more than a look
            frames += [_equal(PIECE_BYTES)] * (start // PIECE_BYTES)
            hashed.update(new[:start].data)
            if not old.flags.writeable:
                held = fresh(new.size)
                held[:start] = new[:start]
        changed += count
        if changed:
            frames.append(tools.compressor.compress(piece.data) if count else _equal(piece.size))
            hashed.update(source.data)
            if count or held is not old:
                held[start : start + PIECE_BYTES] = source
    return Advanced(Delta(b"".join(frames), changed), hashed.hexdigest(), held) if changed else None


def take_back(held: Bytes, payload: bytes) -> None:
    """Undo `advance` in place."""
    for start, change in unpacked(payload, held.size):
        piece = held[start : start + change.size]
        np.bitwise_xor(piece, change, out=piece)


def encode_overwrite(old: Bytes, new: Bytes, element_bytes: int) -> Delta | None:
    """Compare element by element.

    Args:
        old, new: u8[n], equally long.
        element_bytes: Size of one element; n is a multiple of it.

    Returns:
        The change, or None when there is none.

    Raises:
        TransportError: too many elements, or lengths differ.
    """
    _same_size(old, new)
    if new.size // element_bytes >= _MAX_ELEMENTS:
        raise TransportError(
            "a tensor is too large for the encoding",
            expected="fewer than 2^32 elements",
            do="set transport.encoding: xor",
        )
    width = _WIDTHS[element_bytes]
    before, after, step = old.view(width), new.view(width), PIECE_BYTES // element_bytes
    differs = _tools.scratch[:step].view(np.bool_)
    found = []
    for start in range(0, after.size, step):
        piece = after[start : start + step]
        unequal = np.not_equal(before[start : start + step], piece, out=differs[: piece.size])
        found.append(np.flatnonzero(unequal) + start)
    positions = np.concatenate(found).astype("<u4") if found else np.empty(0, dtype="<u4")
    if positions.size == 0:
        return None
    values = after[positions]
    changed = int(np.count_nonzero(np.bitwise_xor(values, before[positions]).view(np.uint8)))
    raw = np.uint32(positions.size).astype("<u4").tobytes() + positions.tobytes() + values.tobytes()
    return Delta(compress(np.frombuffer(raw, dtype=np.uint8)), changed)


def cut(data: Bytes) -> Pieces:
    """The pieces of bytes that are at hand."""
    return ((start, data[start : start + PIECE_BYTES]) for start in range(0, data.size, PIECE_BYTES))


def apply_pieces(old: Pieces, size: int, payload: bytes, encoding: Encoding, element_bytes: int) -> Pieces:
    """The new bytes, piece by piece. Check them with a `hasher`: a payload fits any base of its size.

    Args:
        old: The bytes before, u8[size] in all; `full` does not look at them.

    Raises:
        Damaged: also where it belongs to a tensor of another size; perhaps after some pieces.
    """
    if encoding == "overwrite":
        limit = 4 + size // element_bytes * (4 + element_bytes)
        raw = b"".join(piece.tobytes() for _, piece in _frames(payload, limit))
        yield from _overwritten(old, *_elements(raw, size // element_bytes, element_bytes))
    elif encoding == "full":
        yield from unpacked(payload, size)
    else:
        for (start, before), (_, change) in zip(old, unpacked(payload, size), strict=True):
            yield start, np.bitwise_xor(before, change, out=change)


def apply(old: Bytes, payload: bytes, encoding: Encoding, element_bytes: int) -> Bytes:
    """`apply_pieces` of bytes that are at hand, in new memory."""
    return _joined(apply_pieces(cut(old), old.size, payload, encoding, element_bytes), old.size)


def _joined(pieces: Pieces, size: int) -> Bytes:
    whole = np.empty(size, dtype=np.uint8)
    for start, piece in pieces:
        whole[start : start + piece.size] = piece
    return whole


def unpacked(payload: bytes, size: int) -> Pieces:
    """Exactly u8[size] of zstd frames; what says to be more is not unpacked.

    Raises:
        Damaged: also where it is of another size.
    """
    for start, piece in _frames(payload, size):
        if piece.size < min(PIECE_BYTES, size - start):
            raise _damaged(f"{start + piece.size} bytes for a tensor of {size}")
        yield start, piece


def _frames(payload: bytes, limit: int) -> Pieces:
    """At most `limit` bytes, each piece full but the last."""
    scratch = np.empty(min(PIECE_BYTES, limit), dtype=np.uint8)
    try:
        with zstandard.ZstdDecompressor().stream_reader(payload, read_across_frames=True) as reader:
            for start in range(0, limit, PIECE_BYTES):
                piece, filled = scratch[: limit - start], 0
                while filled < piece.size and (count := reader.readinto(piece[filled:].data)):
                    filled += count
                yield start, piece[:filled]
                if filled < piece.size:
                    return
            if reader.read(1):
                raise _damaged(f"more than {limit} bytes")
    except zstandard.ZstdError as error:
        raise _damaged(str(error)) from error


def _elements(
    raw: bytes, limit: int, element_bytes: int
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.unsignedinteger]]:
    """Positions and values of changed elements, all below `limit`."""
    count = int.from_bytes(raw[:4], "little")
    if len(raw) != 4 + count * (4 + element_bytes):
        raise _damaged(f"{len(raw)} bytes for {count} changed elements")
    positions = np.frombuffer(raw, dtype="<u4", count=count, offset=4)
    if count and (int(positions[-1]) >= limit or not (positions[:-1] < positions[1:]).all()):
        raise _damaged(f"positions out of order or past the tensor's {limit} elements")
    values = np.frombuffer(raw, dtype=np.uint8, offset=4 + 4 * count).copy().view(_WIDTHS[element_bytes])
    return positions, values


def _overwritten(old: Pieces, positions: npt.NDArray[np.uint32], values: npt.NDArray[np.unsignedinteger]) -> Pieces:
    scratch, done = np.empty(PIECE_BYTES, dtype=np.uint8), 0
    for start, before in old:
        first = start // values.itemsize
        past = np.uint32(first + before.size // values.itemsize)  # a Python int would have all positions cast each time
        end = int(np.searchsorted(positions, past))
        piece = scratch[: before.size]
        piece[:] = before
        piece.view(values.dtype)[positions[done:end] - first] = values[done:end]
        yield start, piece
        done = end


def _same_size(old: Bytes, new: Bytes) -> None:
    if old.size != new.size:
        raise TransportError("a tensor changed its size", expected=f"{old.size} bytes", found=f"{new.size} bytes")


def compress(raw: Bytes) -> bytes:
    """What `full` publishes of a tensor, and what `unpacked` reads."""
    compressor = _tools.compressor
    return b"".join(compressor.compress(piece.data) for _, piece in cut(raw))


class _Tools(threading.local):
    """One thread's compressor, which is costly to make, and memory for one difference."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True)
        self.scratch = np.empty(PIECE_BYTES, dtype=np.uint8)


_tools = _Tools()


@functools.cache
def _equal(size: int) -> bytes:
    """The frame of a piece in which nothing changed."""
    return zstandard.ZstdCompressor(level=LEVEL, write_content_size=True).compress(bytes(size))


class Hasher(Protocol):
    """What the libraries' checksums share."""

    def update(self, data: memoryview, /) -> object: ...
    def hexdigest(self) -> str: ...


class _Adler32:
    def __init__(self) -> None:
        self._value = zlib.adler32(b"")

    def update(self, data: memoryview, /) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def hasher(kind: Checksum) -> Hasher:
    """Begin a checksum."""
    if kind == "xxh3-128":
        return xxhash.xxh3_128()
    if kind == "adler32":
        return _Adler32()
    from blake3 import blake3

    return blake3()


def checksum(data: Bytes, kind: Checksum) -> str:
    """Of the whole resulting tensor, in hexadecimal."""
    begun = hasher(kind)
    begun.update(data.data)
    return begun.hexdigest()


def _damaged(found: str) -> Damaged:
    return Damaged("a delta is damaged", expected="a payload made for this tensor", found=found)
