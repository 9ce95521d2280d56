"""Safetensors files as ranges of bytes: where each tensor lies, and how to write one without holding it in memory.

Format: huggingface.co/docs/safetensors: u64 little-endian header length, JSON header, then the data, tensor after
tensor. The library itself maps whole files and knows no object stores, hence these forty lines.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from miles_core.errors import TransportError
from miles_transports.delta.codec import PIECE_BYTES, Bytes, Pieces

DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
"""Safetensors' names and torch's."""
ELEMENT_BYTES = {name: 1 if text in ("bool", "int8", "uint8") or "float8" in text else int(text.strip("bfloatuin")) // 8
                 for name, text in DTYPES.items()}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000

ReadRange = Callable[[int, int], bytes]
"""``(start, length)`` to bytes."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file."""

    dtype: str
    """As safetensors writes it: ``BF16``."""
    shape: tuple[int, ...]
    start: int
    """From the beginning of the file, in bytes."""
    num_bytes: int

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Header:
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]


def read_header(read: ReadRange, where: str) -> Header:
    """Parse and check a header; offsets must lie where dtype and shape say.

    Raises:
        TransportError: the file is not a safetensors file, or is cut short.
    """
    prefix = read(0, 8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or not 2 <= length <= MAX_HEADER_BYTES:
        raise _unreadable(where, "no header")
    try:
        raw = json.loads(read(8, length))
        metadata = raw.pop("__metadata__", {})
        entries = {name: _entry(fields, 8 + length) for name, fields in raw.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(where, f"{type(error).__name__}: {error}") from error
    return Header(entries, metadata)


def _entry(fields: Mapping[str, object], data_start: int) -> Entry:
    dtype, shape = str(fields["dtype"]), tuple(int(n) for n in fields["shape"])  # type: ignore[attr-defined]
    start, end = (int(n) for n in fields["data_offsets"])  # type: ignore[attr-defined]
    if start < 0 or end - start != math.prod(shape) * ELEMENT_BYTES[dtype]:
        raise ValueError(f"offsets {start} to {end} do not fit {dtype}{list(shape)}")
    return Entry(dtype, shape, data_start + start, end - start)


def file_header(tensors: Mapping[str, tuple[str, tuple[int, ...], int]], metadata: Mapping[str, str]) -> bytes:
    """What a file begins with; the tensors' bytes follow without a gap.

    Args:
        tensors: Name to dtype, shape and bytes, in the order in which they lie.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape, num_bytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + num_bytes]}
        end += num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of eight, so that tensors can be viewed in place
    return len(text).to_bytes(8, "little") + text


class Folder:
    """A Hugging Face folder's safetensors files, mapped. Reading a tensor copies nothing."""

    def __init__(self, path: Path) -> None:
        """Raises:
        TransportError: there are no safetensors files, two hold one tensor, or one cannot be read.
        """
        self.path = path
        self.files = tuple(sorted(path.glob("*.safetensors")))
        self.headers: dict[Path, Header] = {}
        self.where: dict[str, Path] = {}
        self._maps: dict[Path, Bytes] = {}
        for file in self.files:
            self._maps[file] = np.memmap(file, dtype=np.uint8, mode="r")
            self.headers[file] = read_header(self._reader(file), str(file))
            for name, entry in self.headers[file].entries.items():
                if name in self.where or entry.start + entry.num_bytes > self._maps[file].size:
                    raise _unreadable(str(file), f"tensor {name} comes twice or is cut short")
                self.where[name] = file
        if not self.where:
            raise _unreadable(str(path), "no safetensors file with tensors")

    def _reader(self, file: Path) -> ReadRange:
        return lambda start, length: self._maps[file][start : start + length].tobytes()

    def entry(self, name: str) -> Entry:
        return self.headers[self.where[name]].entries[name]

    def data(self, name: str) -> Bytes:
        """u8[n], read-only, backed by the file."""
        entry = self.entry(name)
        return self._maps[self.where[name]][entry.start : entry.start + entry.num_bytes]

    def pieces(self, name: str) -> Pieces:
        """The same, read instead of mapped: who reads each byte once pays more for its page than for the byte."""
        entry = self.entry(name)
        scratch = np.empty(min(PIECE_BYTES, entry.num_bytes), dtype=np.uint8)
        with self.where[name].open("rb", buffering=0) as file:
            file.seek(entry.start)
            for start in range(0, entry.num_bytes, PIECE_BYTES):
                piece = scratch[: entry.num_bytes - start]
                if file.readinto(piece.data) != piece.size:
                    raise _unreadable(str(self.where[name]), f"tensor {name} is cut short")
                yield start, piece


def _unreadable(where: str, found: str) -> TransportError:
    return TransportError("a weight file cannot be read", expected="a safetensors file", found=found, where=where)
