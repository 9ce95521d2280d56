"""Transport `disk-delta`: publishes what changed since the last version; each host patches its own copy of the model.

For hosts that share storage and no fast network. In each publish:

    trainer ranks   compare and write their shards                       (source.py)
    driver          waits for all shards, writes the index: published    (index.py)
    engines         build their host's copy, then load it                (checkout.py)

The engines go on serving while all this happens; only the swap of what they staged pauses them. A version whose bytes
equal the last one's, such as the first of a fresh run, publishes nothing.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch

from miles_core.config.files import absolute
from miles_core.kinds.transport import WeightSource
from miles_core.types import NamedTensor, WeightBucket, WeightManifest
from miles_transports.delta import tensorfile
from miles_transports.delta.checkout import Checkout
from miles_transports.delta.publication import Publication
from miles_transports.delta.source import DeltaSource
from miles_transports.delta.store import open_store
from miles_transports.joined import ENGINE_PATIENCE, Ends, JoinedTransport
from miles_transports.meeting import Address, Meeting
from miles_transports.memory import Recycled
from miles_transports.options import DiskDeltaOptions


class DeltaSender:
    """`kinds.transport.SharedSender` of one trainer rank."""

    def __init__(
        self, address: Address, options: DiskDeltaOptions, lineage: str, base: Path, rank: int, world_size: int
    ) -> None:
        self._meeting = Meeting.join(address, f"trainer rank {rank}")
        self._rank = rank
        self._source = DeltaSource(
            base,
            open_store(options.publish_dir),
            lineage,
            rank=rank,
            world_size=world_size,
            encoding=options.encoding,
            kind=options.checksum,
            visible_s=options.visible_s,
        )
        self._attempt = 0
        self._plan: list[list[str]] = []

    def send(self, bucket: WeightBucket) -> None:
        if bucket.index == 0:
            self._attempt = self._meeting.attempt()
            self._plan = []
            self._source.begin(bucket.version, cast(int, self._meeting.told("base")))
        self._meeting.raise_if_over(self._attempt)
        self._source.add(bucket)
        self._plan.append([named.name for named in bucket.tensors])

    def finish(self, version: int) -> Mapping[str, float]:
        figures = self._source.finish(full=cast(bool, self._meeting.told("full")))
        if self._rank == 0:
            self._meeting.tell(f"{self._attempt}/plan", self._plan)
        return figures

    def abort(self, reason: str) -> None:
        self._meeting.give_up(f"trainer rank {self._rank} gave up: {reason}")

    def close(self) -> None:
        self._meeting.leave()
        self._source.close()


class DeltaReceiver:
    """`kinds.transport.FolderReceiver` of one engine."""

    def __init__(self, address: Address, options: DiskDeltaOptions, lineage: str, base: Path, engine: int) -> None:
        self._meeting = Meeting.join(address, f"engine {engine}", patience=ENGINE_PATIENCE)
        self._checkout = Checkout(
            base, Path(options.local_dir), open_store(options.publish_dir), lineage, timeout_s=options.visible_s
        )
        self._memory = Recycled()

    def receive(self, version: int) -> Iterator[WeightBucket]:
        attempt = self._meeting.attempt()
        folder = tensorfile.Folder(self._materialise(attempt, version))
        plan = cast("list[list[str]]", self._meeting.told(f"{attempt}/plan"))
        for number, names in enumerate(plan):
            self._meeting.raise_if_over(attempt)
            tensors = tuple(NamedTensor(name=name, tensor=self._read(folder, name)) for name in names)
            yield WeightBucket(version=version, index=number, last=number == len(plan) - 1, tensors=tensors)

    def _read(self, folder: tensorfile.Folder, name: str) -> torch.Tensor:
        """A tensor of its own, copied out of the mapped file."""
        entry = folder.entry(name)
        raw = self._memory.take(entry.num_bytes, torch.device("cpu"))
        np.copyto(raw.numpy(), folder.data(name))
        return raw.view(getattr(torch, tensorfile.DTYPES[entry.dtype])).view(entry.shape)

    def materialise(self, version: int) -> Path:
        return self._materialise(self._meeting.attempt(), version)

    def _materialise(self, attempt: int, version: int) -> Path:
        key = f"{attempt}/published"
        self._meeting.wait(attempt, [key], missing=f"the publication of version {version}")
        published, digest = cast("tuple[int, str]", self._meeting.told(key))
        return self._checkout.materialise((published, digest), lambda: self._meeting.raise_if_over(attempt))

    def close(self) -> None:
        self._meeting.leave()


class DiskDeltaTransport(JoinedTransport):
    """See the module; `kinds.transport.Transport`."""

    name = "disk-delta"

    def __init__(self, options: DiskDeltaOptions) -> None:
        super().__init__(options.host, options.timeout_s)
        # Relative folders start where the command was started; ranks and engines may start elsewhere.
        folders = {name: getattr(options, name) for name in ("publish_dir", "local_dir")}
        known = {name: str(absolute(place)) for name, place in folders.items() if "://" not in place}
        self._options = options.model_copy(update=known)
        self._publication: Publication | None = None
        self._base: Path | None = None

    def ends(self, address: Address, source: WeightSource) -> Ends:
        options, base = self._options, Path(source.model_path)
        if self._publication is None or self._base != base:
            self._base = base
            self._publication = Publication(
                open_store(options.publish_dir),
                uuid.uuid4().hex[:12],
                names=tensorfile.Folder(base).where,
                encoding=options.encoding,
                kind=options.checksum,
                snapshot_every=options.snapshot_every,
                keep=options.keep,
                visible_s=options.visible_s,
            )
        # Opened again, for an engine that joins late, the chain goes on: members patch what they have.
        lineage = self._publication.lineage
        return Ends(
            senders=functools.partial(DeltaSender, address, options, lineage, base),
            receiver=lambda engine: functools.partial(DeltaReceiver, address, options, lineage, base, engine),
        )

    def begin(self, meeting: Meeting, version: int) -> None:
        base, full = self._opened().begin(version)
        meeting.tell("base", base)
        meeting.tell("full", full)

    def sent(self, meeting: Meeting, attempt: int, manifest: WeightManifest) -> WeightManifest:
        check = functools.partial(meeting.raise_if_over, attempt)
        newest = self._opened().seal(manifest.version, manifest.digests, check)
        meeting.forget([f"{attempt - 1}/plan", f"{attempt - 1}/published"])
        meeting.tell(f"{attempt}/published", newest)
        changed = manifest.figures.get("changed_bytes", 0.0)
        figures = {name: value for name, value in manifest.figures.items() if name != "changed_bytes"}
        return replace(manifest, figures={**figures, "density": changed / max(manifest.num_bytes, 1)})

    def staged(self, version: int) -> None:
        self._opened().collect()

    def _opened(self) -> Publication:
        assert self._publication is not None, "publish comes after open"
        return self._publication
