"""The two ends of transport `p2p`. For each bucket and target rank:

    target   offers registered memory for it                                              (store)
    source   says what is coming                                                          (store)
    target   offers a larger block instead where it does not fit                          (store)
    source   packs it piece by piece into its staging memory, writes each piece while it
             packs the next, and says when all of it is there                             (Mooncake, store)

The target hands the memory itself on, see `lending`. A source's registered memory is constant: a few pieces, however
many engines there are. A failed publish begins a new generation: nothing that was offered before is registered
any longer, so a write that was given up can no longer land anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from typing import cast

import torch

from miles_core.errors import TransportError
from miles_core.types import NamedTensor, WeightBucket
from miles_core.watch import waiting
from miles_transports.joined import ENGINE_PATIENCE
from miles_transports.meeting import Address, Meeting, own_address
from miles_transports.options import P2pOptions
from miles_transports.p2p.assignment import Target, assign
from miles_transports.p2p.lending import Block, Lending
from miles_transports.p2p.replica import FUSED, HUGGING_FACE, Parameter, Replica, Rules, restore
from miles_transports.p2p.staging import Staging
from miles_transports.p2p.wire import Peer, Segment, Wire
from miles_transports.packing import Layout, fill_pieces, layout_of, pieces, unpack

MIB = 2**20
AHEAD = 2
"""Buckets that are offered beyond the one in hand: one is written while the caller works on that, and he still holds
the one before when he asks for the next."""

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
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="p2p-write")  # one after another: see `_write`
        self._staging: Staging | None = None
        self._state = _SenderState(attempt=0, generation=0)
        self._stale_keys: list[str] = []

    def send(self, bucket: WeightBucket) -> None:
        if self._wire is None:
            return
        meeting = self._meeting
        if bucket.index == 0:
            self._begin(meeting.attempt())
        meeting.raise_if_over(self._state.attempt)
        for rank, same_layout in groupby(self._targets, key=lambda target: target.rank):
            parameters = list(self._state.replicas[rank].load(bucket.tensors))
            if bucket.last:
                self._state.replicas[rank].finish()
            laid_out = _laid_out(bucket, parameters)
            rows = {parameter.name: parameter.rows for parameter in parameters if parameter.rows}
            announcement = Announcement(layout=layout_of(laid_out), rows=rows)
            self._send_pieces(list(same_layout), laid_out, announcement)

    def _send_pieces(self, targets: Sequence[Target], bucket: WeightBucket, announcement: Announcement) -> None:
        """Pack once for all targets of a layout, and let the pool write what is packed."""
        state, layout, staging = self._state, announcement.layout, self._staging
        assert staging is not None
        for target in targets:
            self._announce(target, announcement)
        peers: dict[Target, Peer] = {}
        parts = pieces(layout.num_bytes, staging.piece_bytes) or [(0, 0)]  # that nothing comes is said, too
        for begin, end, block in fill_pieces(bucket, layout, parts, staging.blocks()):
            piece = Segment(0, end - begin, begin)
            for target in targets:
                if target not in peers:
                    peers[target] = self._place(target, layout)
                staging.read_by(self._pool.submit(self._write, state, target, layout, peers[target], block, piece))

    def finish(self, version: int) -> Mapping[str, float]:
        """Wait for the writes in the background; a failure is raised here at the latest."""
        if self._staging is not None:
            self._staging.settle()
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
        if self._staging is None or generation != self._state.generation:
            if self._staging is not None:
                self._staging.close()
            self._staging = Staging(wire, self._options.segment_mib * MIB)
        size = self._options.engine_ranks
        rules = RULES[self._options.layout]
        self._state.given_up = True  # where the one before was, what is left of its writes may still wait in the pool
        self._state = _SenderState(
            attempt=attempt,
            generation=generation,
            replicas={target.rank: Replica(rules, target.rank, size) for target in self._targets},
            retried_before=wire.retried,
        )

    def _announce(self, target: Target, announcement: Announcement) -> None:
        keys, index = _Keys(self._state.attempt, target), announcement.layout.index
        if index == 0:
            self._stale_keys += [keys.of("offer", each) for each in range(AHEAD)]
        self._stale_keys += [keys.of("offer", index + AHEAD)]
        self._stale_keys += [keys.of(each, index) for each in ("layout", "larger", "written")]
        self._meeting.tell(keys.of("layout", index), announcement.to_json())

    def _place(self, target: Target, layout: Layout) -> Peer:
        """The memory that the bucket is to be written to, once it is offered."""
        keys, what = _Keys(self._state.attempt, target), f"bucket {layout.index} of version {layout.version}"
        peer = self._offered(target, keys.of("offer", layout.index), what)
        if peer.num_bytes < layout.num_bytes:
            peer = self._offered(target, keys.of("larger", layout.index), what)
        return peer

    def _offered(self, target: Target, key: str, what: str) -> Peer:
        with waiting("trainer", on=f"engine {target.engine} to make room for {what}"):
            self._meeting.wait(self._state.attempt, [key], missing=f"memory for {what}")
        endpoint, address, num_bytes = cast("tuple[str, int, int]", self._meeting.told(key))
        return Peer(endpoint=endpoint, address=address, num_bytes=num_bytes)

    def _write(
        self, state: _SenderState, target: Target, layout: Layout, peer: Peer, block: torch.Tensor, piece: Segment
    ) -> None:
        """Write one piece; after a bucket's last one say so. Nothing once another piece of this version has failed."""
        wire = self._wire
        assert wire is not None
        if state.given_up:
            return
        what = f"bucket {layout.index} of version {layout.version} to engine {target.engine}"
        if self._options.engine_ranks > 1:
            what += f" rank {target.rank}"
        try:
            wire.write(block, peer, [piece], what=what)
        except TransportError as error:
            state.given_up = True
            names = ", ".join(slot.name for slot in layout.slots[:3])
            error.where = f"{error.where}; tensors {names}{' …' if len(layout.slots) > 3 else ''}"
            raise
        state.wire_bytes += piece.num_bytes
        if piece.peer_offset + piece.num_bytes == layout.num_bytes:
            self._meeting.tell(_Keys(state.attempt, target).of("written", layout.index), True)


class _SenderState:
    """What begins anew with every version, or with every generation."""

    def __init__(
        self,
        *,
        attempt: int,
        generation: int,
        replicas: dict[int, Replica] | None = None,
        retried_before: int = 0,
    ) -> None:
        self.attempt = attempt
        self.generation = generation
        self.replicas = replicas or {}
        self.retried_before = retried_before
        self.wire_bytes = 0
        self.given_up = False
        """Whether a write failed, so that none is begun any more."""


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
        self._lending = Lending(self._wire)
        self._offers: dict[tuple[Target, int], Block] = {}
        self._largest = 0

    def receive(self, version: int) -> Iterator[WeightBucket]:
        attempt = self._meeting.attempt()
        self._renew(cast(int, self._meeting.told("generation")))
        for index in range(AHEAD + 1):
            self._offer(attempt, index)
        index, complete = 0, False
        try:
            while not complete:
                what = f"bucket {index} of version {version}"
                announcements = [self._prepare(attempt, target, index, version, what) for target in self._targets]
                ranks = [self._take(attempt, *pair, what) for pair in zip(self._targets, announcements, strict=True)]
                complete = announcements[0].layout.last
                tensors = tuple(restore(self._rules, ranks))
                yield WeightBucket(version=version, index=index, last=complete, tensors=tensors)
                del ranks, tensors
                if index and not complete:  # the caller has let go of the bucket before this one, if he ever will
                    self._offer(attempt, index + AHEAD)
                index += 1
        finally:
            self._withdraw()

    def close(self) -> None:
        self._meeting.leave()
        self._lending.close()
        self._wire.close()

    def _renew(self, generation: int) -> None:
        if generation != self._generation:
            self._generation = generation
            self._lending.close()
            self._lending = Lending(self._wire)

    def _offer(self, attempt: int, index: int) -> None:
        """Memory for a bucket of which nothing is known yet."""
        for target in self._targets:
            block = self._offers[target, index] = self._lending.lend(self._largest)
            self._tell(_Keys(attempt, target).of("offer", index), block)

    def _withdraw(self) -> None:
        """No write is expected any more. If one is on its way all the same, its generation is over."""
        for block in self._offers.values():
            self._lending.give_back(block)
        self._offers.clear()

    def _tell(self, key: str, block: Block) -> None:
        self._meeting.tell(key, [block.peer.endpoint, block.peer.address, block.peer.num_bytes])

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
        self._largest = max(self._largest, layout.num_bytes)
        offer = self._offers[target, index]
        if offer.peer.num_bytes < layout.num_bytes:
            self._lending.give_back(offer)
            larger = self._offers[target, index] = self._lending.lend(layout.num_bytes)
            self._tell(keys.of("larger", index), larger)
        return announcement

    def _take(self, attempt: int, target: Target, announcement: Announcement, what: str) -> list[Parameter]:
        layout = announcement.layout
        written = _Keys(attempt, target).of("written", layout.index)
        with waiting(self._name, on=f"the trainer's write of {what}"):
            self._meeting.wait(attempt, [written], missing=f"the write of {what}")
        block = self._lending.hand_over(self._offers.pop((target, layout.index)), layout.num_bytes)
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
