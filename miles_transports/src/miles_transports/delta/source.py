"""One trainer rank's side of disk-delta: compares the tensors it owns with the last published version, and writes.

A rank keeps bytes of its own share only, so no host ever holds a second full model. Until a tensor first changes, its
old bytes are the checkpoint's file itself, mapped. From then on there is one copy, which each comparison moves forward.

A rank that is connected anew, because an engine joined late, finds the bytes published last in what is published.

The comparison moves the rank's memory forward before the version is known to be published. The payloads are kept until
the next version begins: if that one builds on this one they are dropped, if not they are taken back.
"""

from __future__ import annotations

import itertools
import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch

from miles_core.errors import TransportError
from miles_core.types import NamedTensor, WeightBucket
from miles_core.weights.stopwatch import Stopwatch
from miles_transports.delta import codec, index, tensorfile
from miles_transports.delta.chain import Changes, ways
from miles_transports.delta.codec import Bytes, Checksum, Delta, Encoding
from miles_transports.delta.store import Store, eventually
from miles_transports.memory import Recycled, fresh

WORKERS = 32
"""Threads that compare and compress, at most; numpy and zstd let go of the interpreter while they do."""

LOST = -2
"""What a rank has published when it does not know any more."""


@dataclass(frozen=True, slots=True)
class Change:
    """A changed tensor of the version in progress."""

    delta: Delta
    checksum: str
    old: Bytes | None
    """The bytes before; None where the payload brings them back, as `codec.take_back` does."""


class DeltaSource:
    """See the module. One per rank; its calls come from one thread."""

    def __init__(
        self,
        base: Path,
        store: Store,
        lineage: str,
        *,
        rank: int,
        world_size: int,
        encoding: Encoding,
        kind: Checksum,
        visible_s: float,
    ) -> None:
        self._base = tensorfile.Folder(base)
        self._store, self._lineage = store, lineage
        self._rank, self._world_size = rank, world_size
        self._encoding, self._checksum = encoding, kind
        self._visible_s = visible_s
        self._chain: Changes | None = None  # from the checkpoint to where this rank came in
        self._bytes: dict[str, Bytes] = {}
        self._memory = Recycled()
        self._published = index.BASE
        self._pending: int | None = None
        self._changes: dict[str, Change] = {}
        self._jobs: dict[str, Future[Change | None]] = {}
        self._owned: list[str] = []
        self._pool = ThreadPoolExecutor(min(WORKERS, os.cpu_count() or 1), thread_name_prefix="miles-delta")

    def begin(self, version: int, base_version: int) -> None:
        """Start comparing with `base_version`: the last one this rank wrote, the one before when that was given up, or,
        when it has written none, one that others wrote.

        Raises:
            TransportError: this rank knows none of them.
        """
        self._settle()  # what failed in an attempt that was given up has been told there
        if self._pending is not None and self._pending == base_version:
            self._published = self._pending
        elif self._pending is not None:
            for name, change in self._changes.items():
                if change.old is not None:
                    self._bytes[name] = change.old
                else:
                    codec.take_back(self._bytes[name], change.delta.payload)
        if self._pending is None and base_version != index.BASE:
            self._chain = self._come_in(base_version)
            self._published = base_version
        if self._published != base_version:
            raise TransportError(
                "this rank does not know the version that the next one builds on",
                expected=f"version {base_version}",
                found=f"version {self._published}",
                where=f"trainer rank {self._rank}",
                do="restart the run with --resume",
            )
        self._pending, self._changes, self._owned = version, {}, []

    def _come_in(self, version: int) -> Changes:
        store, lineage = self._store, self._lineage
        last = eventually(lambda: index.read_index(store, lineage, version), f"version {version}", self._visible_s)
        found = next(ways(store, lineage, last, lambda key: key == index.CHECKPOINT), None)
        if found is None:
            raise TransportError(
                f"version {version} hangs on versions that were removed",
                expected="a chain from the checkpoint, or a full snapshot",
                where=f"lineage {lineage}",
                do="restart the run with --resume, which begins a new lineage",
            )
        return Changes(store, found[1], self._visible_s, lambda: None)

    def _published_bytes(self, name: str) -> Bytes:
        """Those of the last published version: in memory, or the checkpoint's with what was published since."""
        held = self._bytes.get(name)
        if held is not None:
            return held
        if self._chain is None or name not in self._chain.names:
            return self._base.data(name)
        held = fresh(self._base.entry(name).num_bytes)
        for start, piece in self._chain.apply(self._base, name):
            held[start : start + piece.size] = piece
        self._bytes[name] = held
        return held

    def add(self, bucket: WeightBucket) -> None:
        """Look at a bucket; compare what this rank owns of it.

        Raises:
            TransportError: a tensor is not the checkpoint's: its name, dtype, shape or size.
        """
        for named in bucket.tensors:
            self._check(named)
        if bucket.owner(self._world_size) == self._rank:
            borrowed = []
            for named in bucket.tensors:
                new, copied = self._main_memory(named.tensor)
                self._owned.append(named.name)
                self._jobs[named.name] = job = self._pool.submit(self._compare, named.name, new)
                if not copied:
                    borrowed.append(job)
            wait(borrowed)  # the caller's tensors may change once this returns

    def _main_memory(self, tensor: torch.Tensor) -> tuple[Bytes, bool]:
        """A tensor's row-major bytes, and whether they are a copy: only what lies elsewhere has to be one."""
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        copied = flat.data_ptr() != tensor.data_ptr()
        if flat.device.type == "cpu" and (copied or self._encoding == "xor"):
            return flat.numpy(), copied
        block = self._memory.take(flat.numel(), torch.device("cpu"))
        block.copy_(flat)
        return block.numpy(), True

    def _check(self, named: NamedTensor) -> None:
        found = f"{str(named.tensor.dtype).removeprefix('torch.')} {tuple(named.tensor.shape)}"
        if named.name not in self._base.where:
            raise self._mismatch(f"tensor {named.name} is not in the checkpoint", "its names", named.name)
        entry = self._base.entry(named.name)
        expected = f"{tensorfile.DTYPES[entry.dtype]} {entry.shape}"
        if found != expected:
            raise self._mismatch(f"tensor {named.name} is not the checkpoint's", expected, found)

    def _mismatch(self, message: str, expected: str, found: str) -> TransportError:
        return TransportError(
            message,
            expected=expected,
            found=found,
            where=str(self._base.path),
            do="train in the checkpoint's dtypes (backend.export_dtype: checkpoint), or pick another transport",
        )

    def _compare(self, name: str, new: Bytes) -> Change | None:
        old = self._published_bytes(name)
        if self._encoding == "xor":
            try:
                found = codec.advance(old, new, self._checksum)
            except BaseException:
                self._published = LOST  # half of the tensor may have moved
                raise
            if found is None:
                return None
            self._bytes[name] = found.held
            return Change(found.delta, found.checksum, None)
        delta = codec.encode_overwrite(old, new, self._base.entry(name).element_bytes)
        if delta is None:
            return None
        self._bytes[name] = new
        return Change(delta, codec.checksum(new, self._checksum), old)

    def _settle(self) -> list[BaseException]:
        """Wait for comparisons in progress; what failed among them."""
        jobs, self._jobs = self._jobs, {}
        outcomes = {name: job.exception() for name, job in jobs.items()}
        for name, job in jobs.items():
            if outcomes[name] is None and (change := job.result()) is not None:
                self._changes[name] = change
        return [error for error in outcomes.values() if error is not None]

    def finish(self, *, full: bool) -> dict[str, float]:
        """Write this rank's shard and listing, and those of a full snapshot when asked; figures of the cost.

        Raises:
            TransportError: comparing or writing failed.
        """
        version, clock = self._pending, Stopwatch()
        assert version is not None
        with clock.running("encode_s"):
            if failures := self._settle():
                raise failures[0]
        changes = {name: (change.delta.payload, change.checksum) for name, change in self._changes.items()}
        with clock.running("write_s"):
            wire = self._write(index.folder_of(self._lineage, version), changes)
            if full:
                wire += self._write(index.folder_of(self._lineage, version, full=True), self._snapshot())
        return {
            **clock.seconds,
            "wire_bytes": float(wire),
            "changed_bytes": float(sum(change.delta.changed_bytes for change in self._changes.values())),
        }

    def _snapshot(self) -> dict[str, tuple[bytes, str]]:
        return dict(zip(self._owned, self._pool.map(self._whole, self._owned), strict=True))

    def _whole(self, name: str) -> tuple[bytes, str]:
        data = self._published_bytes(name)
        return codec.compress(data), codec.checksum(data, self._checksum)

    def _write(self, folder: str, payloads: dict[str, tuple[bytes, str]]) -> int:
        shard = f"model-{self._rank + 1:05d}-of-{self._world_size:05d}.safetensors" if payloads else None
        num_bytes = 0
        if shard is not None:
            header = tensorfile.file_header(
                {name: ("U8", (len(payload),), len(payload)) for name, (payload, _) in payloads.items()},
                {name: digest for name, (_, digest) in payloads.items()},
            )
            contents = (payload for payload, _ in payloads.values())
            num_bytes = self._store.write(f"{folder}/{shard}", itertools.chain([header], contents))
        listing = index.RankListing(
            rank=self._rank,
            world_size=self._world_size,
            shard=shard,
            num_bytes=num_bytes,
            changed={name: digest for name, (_, digest) in payloads.items()},
            owned=tuple(self._owned),
        )
        return num_bytes + self._store.write(index.listing_name(folder, self._rank), [listing.to_json()])

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
