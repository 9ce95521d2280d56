"""Encodings: what is applied is what was encoded, damage is found, and the library reads our files."""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.errors import TransportError
from miles_transports.delta import tensorfile
from miles_transports.delta.codec import (
    CHECKSUMS,
    PIECE_BYTES,
    Bytes,
    Checksum,
    Delta,
    Encoding,
    advance,
    apply,
    checksum,
    compress,
    encode_overwrite,
    hasher,
    take_back,
)

WIDTHS = (1, 2, 4, 8)


def encode(old: Bytes, new: Bytes, encoding: Encoding, width: int) -> Delta | None:
    """As a trainer rank does, whichever it is."""
    if encoding == "full":
        return Delta(compress(new), new.size)
    if encoding == "overwrite":
        return encode_overwrite(old, new, width)
    found = advance(old.copy(), new, "adler32")
    return None if found is None else found.delta


def packed(raw: bytes) -> bytes:
    return compress(np.frombuffer(raw, dtype=np.uint8))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Bytes, Bytes, int]:
    width = draw(st.sampled_from(WIDTHS))
    count = draw(st.integers(0, 60))
    old = np.frombuffer(draw(st.binary(min_size=count * width, max_size=count * width)), dtype=np.uint8)
    if count and draw(st.booleans()):  # several pieces, the last one short
        old = np.resize(old, (2 * PIECE_BYTES // width + count) * width)
        count = old.size // width
    new = old.copy()
    for at in draw(st.lists(st.integers(0, max(count * width - 1, 0)), max_size=8)) if count else []:
        new[at] = draw(st.integers(0, 255))
    return old, new, width


@settings(max_examples=40)
@given(pairs(), st.sampled_from(["xor", "overwrite", "full"]))
def test_applying_a_delta_to_its_base_gives_the_new_bytes(case: tuple[Bytes, Bytes, int], encoding: Encoding) -> None:
    old, new, width = case
    delta = encode(old, new, encoding, width)
    changed = int(np.count_nonzero(old != new))
    if delta is None:
        assert changed == 0
        return
    assert np.array_equal(apply(old, delta.payload, encoding, width), new)
    if encoding != "full":
        assert delta.changed_bytes == changed > 0


@settings(max_examples=40)
@given(pairs())
def test_overwrite_can_be_applied_twice_and_a_second_xor_is_found_by_the_checksum(
    case: tuple[Bytes, Bytes, int],
) -> None:
    old, new, width = case
    overwrite, xor = encode(old, new, "overwrite", width), encode(old, new, "xor", width)
    if overwrite is None or xor is None:
        return
    assert np.array_equal(apply(new, overwrite.payload, "overwrite", width), new)
    twice = apply(new, xor.payload, "xor", width)
    assert checksum(twice, "xxh3-128") != checksum(new, "xxh3-128")


@settings(max_examples=40)
@given(pairs(), st.booleans(), st.sampled_from(CHECKSUMS))
def test_memory_moves_forward_in_place_and_back_again(
    case: tuple[Bytes, Bytes, int], read_only: bool, kind: Checksum
) -> None:
    old, new, _ = case
    before = old.copy()
    before.flags.writeable = not read_only
    found = advance(before, new, kind)
    if found is None:
        assert np.array_equal(old, new)
        return
    assert (found.held is before) is not read_only
    assert np.array_equal(found.held, new)
    assert found.checksum == checksum(new, kind)
    take_back(found.held, found.delta.payload)
    assert np.array_equal(found.held, old)
    assert not read_only or np.array_equal(before, old)


@pytest.mark.parametrize("kind", CHECKSUMS)
def test_a_checksum_may_be_taken_in_pieces(kind: Checksum) -> None:
    data, begun = np.arange(1000, dtype=np.uint32).view(np.uint8), hasher(kind)
    for part in np.array_split(data, 7):
        begun.update(part.data)
    assert begun.hexdigest() == checksum(data, kind)


def test_the_wire_format_of_overwrite_is_count_positions_values() -> None:
    old = np.zeros(8, dtype=np.uint8)
    new = old.copy()
    new[[2, 7]] = 5, 6
    delta = encode(old, new, "overwrite", 2)
    assert delta is not None
    import zstandard

    raw = zstandard.ZstdDecompressor().decompress(delta.payload)
    assert raw == bytes.fromhex("02000000 01000000 03000000 0500 0006")


@pytest.mark.parametrize("encoding", ["xor", "overwrite", "full"])
@pytest.mark.parametrize(
    "payload", [b"", b"no zstd", packed(b"12345"), packed(b"\xff" * 4), packed(bytes(10**6)), packed(bytes(8)) * 2]
)
def test_damaged_foreign_and_oversized_payloads_are_refused(encoding: Encoding, payload: bytes) -> None:
    with pytest.raises(TransportError, match="damaged"):
        apply(np.zeros(8, dtype=np.uint8), payload, encoding, 2)


def test_a_position_outside_the_tensor_is_refused() -> None:
    raw = (1).to_bytes(4, "little") + (9).to_bytes(4, "little") + b"xx"
    with pytest.raises(TransportError, match="damaged"):
        apply(np.zeros(8, dtype=np.uint8), packed(raw), "overwrite", 2)


def test_checksums_are_those_of_their_libraries() -> None:
    from blake3 import blake3

    data = np.arange(1000, dtype=np.uint32).view(np.uint8)
    assert checksum(data, "xxh3-128") == xxhash.xxh3_128(data.tobytes()).hexdigest()
    assert checksum(data, "blake3") == blake3(data.tobytes()).hexdigest()
    assert checksum(data, "adler32") == f"{zlib.adler32(data.tobytes()):08x}"
    assert checksum(data, "xxh3-128") != hashlib.md5(data.tobytes()).hexdigest()


def test_our_files_are_read_by_the_library_and_its_files_by_us(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
        "b": torch.tensor(7, dtype=torch.int64),
        "c": torch.ones(5, dtype=torch.float8_e4m3fn),
        "d": torch.tensor([True, False, True]),
        "e": torch.zeros(0, 4),
    }
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    folder = tensorfile.Folder(tmp_path)
    header = folder.headers[tmp_path / "model.safetensors"]
    assert header.metadata == {"format": "pt"}
    for name, tensor in tensors.items():
        assert folder.data(name).tobytes() == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert tensorfile.DTYPES[folder.entry(name).dtype] == str(tensor.dtype).removeprefix("torch.")
        assert folder.entry(name).element_bytes == tensor.element_size()
    ordered = sorted(header.entries.items(), key=lambda item: item[1].start)
    ours = tensorfile.file_header(
        {name: (entry.dtype, entry.shape, entry.num_bytes) for name, entry in ordered}, {"format": "pt"}
    )
    (tmp_path / "ours").write_bytes(ours + b"".join(folder.data(name).tobytes() for name, _ in ordered))
    loaded = safetensors.torch.load_file(tmp_path / "ours")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("cut", [0, 4, 30, -1])
def test_a_file_cut_short_is_refused(tmp_path: Path, cut: int) -> None:
    safetensors.torch.save_file({"a": torch.ones(4)}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:cut] or b"\0")
    with pytest.raises(TransportError, match="cannot be read"):
        tensorfile.Folder(tmp_path)
