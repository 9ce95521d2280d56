"""What changed between two byte strings of one length, and how to apply it. Pure; knows nothing of files or tensors.

    xor        old XOR new, as long as the tensor; unchanged bytes are zeros, which compress to almost nothing.
               Applying it twice gives the old bytes again, so the result must be checked against its checksum.
    overwrite  u32 count, u32 positions[count] in elements, then the new elements; little-endian. Idempotent.
    full       the new bytes themselves; needs no base.

Every payload is one zstd frame (level 1) that states its content size.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from miles_core.errors import TransportError

Bytes = npt.NDArray[np.uint8]
Encoding = Literal["xor", "overwrite", "full"]
Checksum = Literal["xxh3-128", "blake3", "adler32"]

ENCODINGS: tuple[Encoding, ...] = ("xor", "overwrite", "full")
CHECKSUMS: tuple[Checksum, ...] = ("xxh3-128", "blake3", "adler32")
LEVEL = 1
"""Deltas are mostly zeros or sorted positions; higher levels cost time and gain a few per cent."""
PIECE_BYTES = 2**19
_MAX_ELEMENTS = 2**32
_WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class Delta:
    """One tensor's change."""

    payload: bytes
    """Compressed."""
    changed_bytes: int


def encode(old: Bytes, new: Bytes, encoding: Encoding, element_bytes: int) -> Delta | None:
    """Compare byte by byte.

    Args:
        old, new: u8[n], equally long.
        element_bytes: Size of one element; n is a multiple of it.

    Returns:
        The change, or None when there is none. `full` always returns all bytes.

    Raises:
        TransportError: too many elements for `overwrite`, or lengths differ.
    """
    if old.size != new.size and encoding != "full":
        raise TransportError("a tensor changed its size", expected=f"{old.size} bytes", found=f"{new.size} bytes")
    if encoding == "full":
        return Delta(compress(new.data), new.size)
    if encoding == "xor":
        return _encode_xor(old, new)
    difference = xor(old, new)
    changed = int(np.count_nonzero(difference))
    if changed == 0:
        return None
    width = _WIDTHS[element_bytes]
    if new.size // element_bytes >= _MAX_ELEMENTS:
        raise TransportError(
            "a tensor is too large for the encoding",
            expected="fewer than 2^32 elements",
            do="set transport.encoding: xor",
        )
    positions = np.flatnonzero(difference.view(width)).astype("<u4")
    values = new.view(width)[positions]
    raw = np.uint32(positions.size).astype("<u4").tobytes() + positions.tobytes() + values.tobytes()
    return Delta(compress(raw), changed)


def _encode_xor(old: Bytes, new: Bytes) -> Delta | None:
    """Piece by piece: a piece of the difference is compressed while it lies in the cache."""
    scratch = np.empty(min(PIECE_BYTES, new.size), dtype=np.uint8)
    frame = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True).compressobj(size=new.size)
    parts, changed = [], 0
    for start in range(0, new.size, PIECE_BYTES):
        stop = min(start + PIECE_BYTES, new.size)
        piece = scratch[: stop - start]
        np.bitwise_xor(old[start:stop], new[start:stop], out=piece)
        changed += int(np.count_nonzero(piece))
        parts.append(frame.compress(piece.data))
    return Delta(b"".join([*parts, frame.flush()]), changed) if changed else None


def apply(old: Bytes, payload: bytes, encoding: Encoding, element_bytes: int) -> Bytes:
    """The new bytes. Check them with `checksum`: a payload fits any base of its size.

    Raises:
        TransportError: the payload is damaged or belongs to a tensor of another size.
    """
    if encoding == "overwrite":
        raw = decompress(payload, 4 + old.size // element_bytes * (4 + element_bytes))
        return _overwritten(old, raw, element_bytes)
    found = _unpacked(payload, old.size)
    return found if encoding == "full" else np.bitwise_xor(old, found, out=found)


def _unpacked(payload: bytes, size: int) -> Bytes:
    """u8[size], writable: the xor goes into it instead of into new memory."""
    try:
        stated = zstandard.frame_content_size(payload)
        if stated != size:
            raise _damaged(f"{stated} bytes for a tensor of {size}")
        out = np.empty(size, dtype=np.uint8)
        with zstandard.ZstdDecompressor().stream_reader(payload) as reader:
            filled = 0
            while filled < size and (count := reader.readinto(out[filled:].data)):
                filled += count
        if filled != size:
            raise _damaged(f"{filled} bytes for a tensor of {size}")
    except zstandard.ZstdError as error:
        raise _damaged(str(error)) from error
    return out


def _overwritten(old: Bytes, raw: bytes, element_bytes: int) -> Bytes:
    count = int.from_bytes(raw[:4], "little")
    if len(raw) != 4 + count * (4 + element_bytes):
        raise _damaged(f"{len(raw)} bytes for {count} changed elements")
    positions = np.frombuffer(raw, dtype="<u4", count=count, offset=4)
    width = _WIDTHS[element_bytes]
    new = old.copy()
    elements = new.view(width)
    if count and int(positions.max()) >= elements.size:
        raise _damaged(f"element {int(positions.max())} of a tensor of {elements.size}")
    elements[positions] = np.frombuffer(raw, dtype=np.uint8, offset=4 + 4 * count).copy().view(width)
    return new


def xor(left: Bytes, right: Bytes) -> Bytes:
    """u8[n]"""
    return np.bitwise_xor(left, right)


def compress(raw: bytes | memoryview) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL, write_content_size=True).compress(raw)


def decompress(payload: bytes, limit: int) -> bytes:
    """At most `limit` bytes: the frame states its size, and a larger one is refused before it is unpacked.

    Raises:
        TransportError: the frame is damaged or too large.
    """
    try:
        size = zstandard.frame_content_size(payload)
        if not 0 <= size <= limit:
            raise _damaged(f"a frame of {size} bytes where at most {limit} can be")
        return zstandard.ZstdDecompressor().decompress(payload, max_output_size=max(limit, 1))
    except zstandard.ZstdError as error:
        raise _damaged(str(error)) from error


def checksum(data: Bytes, kind: Checksum) -> str:
    """Of the whole resulting tensor, in hexadecimal."""
    if kind == "xxh3-128":
        return xxhash.xxh3_128_hexdigest(data.data)
    if kind == "adler32":
        return f"{zlib.adler32(data.data):08x}"
    from blake3 import blake3

    return blake3(data.data).hexdigest()


def _damaged(found: str) -> TransportError:
    return TransportError("a delta is damaged", expected="a payload made for this tensor", found=found)
