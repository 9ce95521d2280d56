"""The two ends of transport `p2p`. For each bucket and target rank:

    source   packs the target's parameters into its staging buffer, says what is coming   (store)
    target   has two registered slots and frees each once it has copied it                (store)
    source   writes into the slot, and says that it has                                   (Mooncake, store)

The source packs a bucket into one of two staging buffers while the last target's write reads the other. Registered
memory is constant: two buffers a source, two slots a target rank, however many engines there are. A failed publish
begins a new generation: slots are registered anew, so a write that was given up can no longer land anywhere.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from typing import cast

import torch

from miles_core.errors import TransportError
from miles_core.types import NamedTensor, WeightBucket
from miles_core.watch import waiting
from miles_transports.joined import ENGINE_PATIENCE
from miles_transports.meeting import Address, Meeting, own_address
from miles_transports.memory import Recycled
from miles_transports.options import P2pOptions
from miles_transports.p2p.assignment import Target, assign
from miles_transports.p2p.replica import FUSED, HUGGING_FACE, Parameter, Replica, Rules, restore
from miles_transports.p2p.wire import Peer, Segment, Wire
from miles_transports.packing import Layout, fill, layout_of, unpack

SLOTS = 2
STAGING = 2
_NOTHING = torch.empty(0, dtype=torch.uint8)

RULES: Mapping[str, Rules] = {"hugging-face": HUGGING_FACE, "fused": FUSED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """A bucket as one target rank gets it."""

    layout: Layout
    rows: Mapping[str, Sequence[int]]
    """Of the parts of fused parameters."""

    def to_json(self) -> str:
        return json.dumps([self.layout.to_json(), dict(self.rows)])

    @staticmethod
    def from_json(text: str) -> Announcement:
        layout, rows = json.loads(text)
        return Announcement(layout=Layout.from_json(layout), rows=rows)


class _Keys:
    """Names in the store of what concerns one target rank in one attempt."""

    def __init__(self, attempt: int, target: Target) -> None:
        self._front = f"{attempt}/{target.engine}.{target.rank}"
        self._name = f"engine {target.engine}"

    def of(self, what: str, index: int) -> str:
        return f"{self._front}/{index}/{what}/{self._name}"


class P2pSender:
    """The end in one trainer rank; does nothing when it has no target."""

    def __init__(self, address: Address, options: P2pOptions, rank: int, world_size: int) -> None:
        targets = [
            Target(engine, each) for engine in range(address.num_engines) for each in range(options.engine_ranks)
        ]
        self._targets = assign(world_size, targets)[rank]
        self._options = options
        self._meeting = Meeting.join(address, f"trainer rank {rank}")
        self._wire = _wire(address, options) if self._targets else None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="p2p-last-target")
        self._staging = [_NOTHING] * STAGING
        self._state = _SenderState(generation=0)
        self._attempt = 0
        self._stale_keys: list[str] = []

    def send(self, bucket: WeightBucket) -> None:
        if self._wire is None:
            return
        meeting = self._meeting
        if bucket.index == 0:
            self._attempt = meeting.attempt()
            self._begin(self._attempt)
        attempt = self._attempt
        meeting.raise_if_over(attempt)
        last = self._targets[-1]
        for rank, same_layout in groupby(self._targets, key=lambda target: target.rank):
            parameters = list(self._state.replicas[rank].load(bucket.tensors))
            if bucket.last:
                self._state.replicas[rank].finish()
            laid_out = _laid_out(bucket, parameters)
            rows = {parameter.name: parameter.rows for parameter in parameters if parameter.rows}
            announcement = Announcement(layout=layout_of(laid_out), rows=rows)
            self._settle(leave=STAGING - 1)  # what still reads the buffer that comes next
            staging = self._pack(laid_out, announcement.layout)
            for target in same_layout:
                peer = self._slot(attempt, target, announcement)
                arguments = (attempt, target, announcement.layout, peer, staging)
                if target == last:
                    self._state.background.append(self._pool.submit(self._write, *arguments))
                else:
                    self._write(*arguments)

    def finish(self, version: int) -> Mapping[str, float]:
        """Wait for the write in the background; its failure is raised here at the latest."""
        self._settle()
        wire = self._wire
        return {
            "wire_bytes": float(self._state.wire_bytes),
            "write_retries": float(wire.retried - self._state.retried_before) if wire else 0.0,
        }

    def abort(self, reason: str) -> None:
        self._meeting.give_up(f"the trainer gave up: {reason}")

    def close(self) -> None:
        self._meeting.leave()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._wire is not None:
            self._wire.close()

    def _begin(self, attempt: int) -> None:
        self._meeting.forget(self._stale_keys)
        self._stale_keys = []
        generation = cast(int, self._meeting.told("generation"))
        wire = self._wire
        assert wire is not None
        if generation != self._state.generation:
            # A write that was given up may still read an old buffer; its thread keeps that alive.
            for buffer in self._staging:
                wire.unregister(buffer)
            self._staging = [_NOTHING] * STAGING
        size = self._options.engine_ranks
        rules = RULES[self._options.layout]
        self._state = _SenderState(
            generation=generation,
            replicas={target.rank: Replica(rules, target.rank, size) for target in self._targets},
            slots=self._state.slots if generation == self._state.generation else {},
            retried_before=wire.retried,
        )

    def _settle(self, leave: int = 0) -> None:
        """Wait for the writes in the background but the `leave` last ones; raise what failed."""
        while len(self._state.background) > leave:
            self._state.background.popleft().result()

    def _pack(self, bucket: WeightBucket, layout: Layout) -> torch.Tensor:
        """The next staging buffer with the bucket in it. Nothing reads the one that is replaced: see `_settle`."""
        wire = self._wire
        assert wire is not None
        buffer = self._staging.pop(0)
        if layout.num_bytes > buffer.numel():
            wire.unregister(buffer)
            buffer = torch.empty(layout.num_bytes, dtype=torch.uint8)
            wire.register(buffer)
        self._staging.append(buffer)
        fill(buffer, bucket, layout)
        return buffer

    def _slot(self, attempt: int, target: Target, announcement: Announcement) -> Peer | None:
        """Announce the bucket; the memory it may be written to, once that is free and large enough."""
        meeting, keys = self._meeting, _Keys(attempt, target)
        layout = announcement.layout
        what = f"bucket {layout.index} of version {layout.version}"
        meeting.tell(keys.of("layout", layout.index), announcement.to_json())
        self._stale_keys += [keys.of(each, layout.index) for each in ("layout", "slot", "written", "taken")]
        if layout.index >= SLOTS:
            with waiting("trainer", on=f"engine {target.engine} to take an earlier bucket than {what}"):
                meeting.wait(attempt, [keys.of("taken", layout.index - SLOTS)], missing=f"the slot for {what}")
        if layout.num_bytes == 0:
            return None
        place = (target, layout.index % SLOTS)
        peer = self._state.slots.get(place)
        if peer is None or peer.num_bytes < layout.num_bytes:
            # Metadata is asked for once; afterwards only when a bucket outgrows its slot.
            key = keys.of("slot", layout.index)
            with waiting("trainer", on=f"engine {target.engine} to make room for {what}"):
                meeting.wait(attempt, [key], missing=f"memory for {what}")
            endpoint, address, num_bytes = cast("tuple[str, int, int]", meeting.told(key))
            peer = self._state.slots[place] = Peer(endpoint=endpoint, address=address, num_bytes=num_bytes)
        return peer

    def _write(self, attempt: int, target: Target, layout: Layout, peer: Peer | None, staging: torch.Tensor) -> None:
        wire = self._wire
        assert wire is not None
        if peer is not None:
            step = self._options.segment_mib * 1024 * 1024
            segments = [
                Segment(start, min(step, layout.num_bytes - start), start) for start in range(0, layout.num_bytes, step)
            ]
            what = f"bucket {layout.index} of version {layout.version} to engine {target.engine}"
            if self._options.engine_ranks > 1:
                what += f" rank {target.rank}"
            try:
                wire.write(staging, peer, segments, what=what)
            except TransportError as error:
                names = ", ".join(slot.name for slot in layout.slots[:3])
                error.where = f"{error.where}; tensors {names}{' …' if len(layout.slots) > 3 else ''}"
                raise
            self._state.wire_bytes += layout.num_bytes
        self._meeting.tell(_Keys(attempt, target).of("written", layout.index), True)


class _SenderState:
    """What begins anew with every version, or with every generation."""

    def __init__(
        self,
        *,
        generation: int,
        replicas: dict[int, Replica] | None = None,
        slots: dict[tuple[Target, int], Peer] | None = None,
        retried_before: int = 0,
    ) -> None:
        self.generation = generation
        self.replicas = replicas or {}
        self.slots = slots if slots is not None else {}
        self.retried_before = retried_before
        self.wire_bytes = 0
        self.background: deque[Future[None]] = deque()


class P2pReceiver:
    """The end in one engine, for all its ranks."""

    def __init__(self, address: Address, options: P2pOptions, engine: int) -> None:
        self._options = options
        self._rules = RULES[options.layout]
        self._name = f"engine {engine}"
        self._targets = [Target(engine, rank) for rank in range(options.engine_ranks)]
        self._meeting = Meeting.join(address, self._name, patience=ENGINE_PATIENCE)
        self._wire = _wire(address, options)
        self._generation = 0
        self._slots: dict[tuple[Target, int], torch.Tensor] = {}
        self._memory = Recycled()

    def receive(self, version: int) -> Iterator[WeightBucket]:
        meeting = self._meeting
        attempt = meeting.attempt()
        self._renew(cast(int, meeting.told("generation")))
        index, complete = 0, False
        while not complete:
            what = f"bucket {index} of version {version}"
            announcements = [self._prepare(attempt, target, index, version, what) for target in self._targets]
            ranks = [self._take(attempt, *pair, what) for pair in zip(self._targets, announcements, strict=True)]
            complete = announcements[0].layout.last
            tensors = tuple(restore(self._rules, ranks))
            yield WeightBucket(version=version, index=index, last=complete, tensors=tensors)
            del ranks, tensors  # their memory may be the next bucket's, where the caller has let go of them too
            index += 1

    def close(self) -> None:
        self._meeting.leave()
        self._slots.clear()
        self._wire.close()

    def _renew(self, generation: int) -> None:
        if generation == self._generation:
            return
        self._generation = generation
        for slot in self._slots.values():
            self._wire.unregister(slot)
        self._slots.clear()

    def _prepare(self, attempt: int, target: Target, index: int, version: int, what: str) -> Announcement:
        """What is coming, with room made for it."""
        meeting, keys = self._meeting, _Keys(attempt, target)
        with waiting(self._name, on=f"the trainer's {what}"):
            meeting.wait(attempt, [keys.of("layout", index)], missing=what)
        announcement = Announcement.from_json(cast(str, meeting.told(keys.of("layout", index))))
        layout = announcement.layout
        if layout.version != version:
            raise TransportError(
                "another version arrived", expected=f"version {version}", found=f"version {layout.version}"
            )
        place = (target, index % SLOTS)
        slot = self._slots.get(place)
        if layout.num_bytes and (slot is None or slot.numel() < layout.num_bytes):
            if slot is not None:
                self._wire.unregister(slot)
            slot = self._slots[place] = torch.empty(layout.num_bytes, dtype=torch.uint8)
            peer = self._wire.register(slot)
            meeting.tell(keys.of("slot", index), [peer.endpoint, peer.address, peer.num_bytes])
        return announcement

    def _take(self, attempt: int, target: Target, announcement: Announcement, what: str) -> list[Parameter]:
        meeting, keys, layout = self._meeting, _Keys(attempt, target), announcement.layout
        with waiting(self._name, on=f"the trainer's write of {what}"):
            meeting.wait(attempt, [keys.of("written", layout.index)], missing=f"the write of {what}")
        block = torch.empty(0, dtype=torch.uint8)
        if layout.num_bytes:
            slot = self._slots[(target, layout.index % SLOTS)]
            block = self._memory.take(layout.num_bytes, slot.device)
            block.copy_(slot[: layout.num_bytes])
        meeting.tell(keys.of("taken", layout.index), True)
        return [
            Parameter(named.name, named.tensor, tuple(announcement.rows.get(named.name, ())))
            for named in unpack(block, layout).tensors
        ]


def _laid_out(bucket: WeightBucket, parameters: Sequence[Parameter]) -> WeightBucket:
    """The bucket as the target sees it: other tensors, or none while their parts are still to come."""
    tensors = tuple(NamedTensor(name=parameter.name, tensor=parameter.tensor) for parameter in parameters)
    return replace(bucket, tensors=tensors)


def _wire(address: Address, options: P2pOptions) -> Wire:
    return Wire(
        own_address(address.host, address.port),
        options.protocol,
        options.device,
        timeout_s=options.write_timeout_s,
        retries=options.write_retries,
    )
