"""Transport `broadcast`: rank 0 of the trainer sends every bucket to all engines through one collective.

For each bucket:

    engines   say that they are ready, while their caller still looks at the one before   (store)
    trainer   packs it while the one before travels, waits for all, says what is coming   (store: layout as JSON)
    all       broadcast one block of bytes                                                (gloo or NCCL)

Whatever fails, the driver ends the attempt in the store, and every wait of every party looks there: nobody sits in a
collective that will never complete. The next publish gets a fresh process group.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import cast

import torch

from miles_core.errors import TransportError
from miles_core.kinds.transport import WeightSource
from miles_core.types import WeightBucket
from miles_core.watch import waiting
from miles_transports.group import BroadcastGroup, Travelling, Wire
from miles_transports.joined import ENGINE_PATIENCE, Ends, JoinedTransport
from miles_transports.meeting import Address, Meeting
from miles_transports.memory import Recycled
from miles_transports.options import BroadcastOptions
from miles_transports.packing import Layout, fill, layout_of, unpack


class _Party:
    """What sender and receivers share: the meeting, and the group that the driver wants in use."""

    def __init__(self, address: Address, rank: int) -> None:
        self.name = "trainer" if rank == 0 else f"engine {rank - 1}"
        self._address = address
        self._rank = rank
        self.meeting = Meeting.join(address, self.name, patience=1.0 if rank == 0 else ENGINE_PATIENCE)
        self._group: BroadcastGroup | None = None
        # Later calls may come from a thread whose current device is another one.
        self._device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        self.meeting.tell(f"device/{self.name}", _device_id(self._device))

    def group(self, attempt: int) -> BroadcastGroup:
        generation = cast(int, self.meeting.told("generation"))
        if self._group is None or self._group.generation != generation:
            self.leave_group()
            wire = cast(Wire, self.meeting.told("wire"))
            self._group = BroadcastGroup(
                self.meeting,
                self._address,
                rank=self._rank,
                device=torch.device("cpu") if wire == "gloo" or self._device is None else self._device,
                generation=generation,
                check=lambda: self.meeting.raise_if_over(attempt),
            )
        return self._group

    def leave_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abandon()

    def close(self) -> None:
        self.meeting.leave()
        self.leave_group()


class BroadcastSender:
    """The trainer's end; group rank 0."""

    def __init__(self, address: Address) -> None:
        self._party = _Party(address, 0)
        self._engines = [f"engine {index}" for index in range(address.num_engines)]
        self._blocks: dict[int, torch.Tensor] = {}
        self._attempt = 0
        self._travelling: tuple[BroadcastGroup, Travelling] | None = None
        self._read: list[str] = []  # keys of this version, for the next one to remove

    def send(self, bucket: WeightBucket) -> None:
        meeting, layout = self._party.meeting, layout_of(bucket)
        if bucket.index == 0:
            self._attempt = meeting.attempt()
            self._travelling = None  # what an attempt that was given up had under way, with its group
            stale, self._read = self._read, []
            self._announce(layout)
            meeting.forget(stale)  # whoever is ready for another version has read all of the one before
        group = self._party.group(self._attempt)  # building one waits for all, and the first bucket has found all there
        block = self._block(bucket.index, layout.num_bytes, group.device)
        fill(block, bucket, layout)  # while the bucket before this one travels
        self._arrive(bucket)
        if bucket.index > 0:
            self._announce(layout)
        self._travelling = group, group.start(block)
        if bucket.last:
            self._arrive(bucket)

    def _announce(self, layout: Layout) -> None:
        """Once all engines are ready for a bucket's collective, say what comes."""
        prefix, which = f"{self._attempt}/{layout.index}", f"bucket {layout.index} of version {layout.version}"
        keys = [f"{prefix}/ready/{engine}" for engine in self._engines]
        with waiting("trainer", on=f"the engines to be ready for {which}"):
            self._party.meeting.wait(self._attempt, keys, missing=f"readiness for {which}")
        self._party.meeting.tell(f"{prefix}/layout", layout.to_json())
        self._read += [*keys, f"{prefix}/layout"]

    def _block(self, index: int, num_bytes: int, device: torch.device) -> torch.Tensor:
        """uint8[num_bytes] of one of two blocks in turn; the bucket that lay in it has arrived."""
        block = self._blocks.get(index % 2)
        if block is None or block.numel() < num_bytes or block.device != device:
            block = self._blocks[index % 2] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return block[:num_bytes]

    def _arrive(self, bucket: WeightBucket) -> None:
        if self._travelling is not None:
            (group, travelling), self._travelling = self._travelling, None
            with waiting("trainer", on=f"the broadcast up to bucket {bucket.index} of version {bucket.version}"):
                group.finish(travelling, lambda: self._party.meeting.raise_if_over(self._attempt))

    def abort(self, reason: str) -> None:
        self._party.meeting.give_up(f"the trainer gave up: {reason}")
        self._travelling = None
        self._party.leave_group()

    def close(self) -> None:
        self._party.close()


class BroadcastReceiver:
    """One engine's end; group rank ``index + 1``."""

    def __init__(self, address: Address, index: int) -> None:
        self._party = _Party(address, index + 1)
        self._memory = Recycled()

    def receive(self, version: int) -> Iterator[WeightBucket]:
        attempt = self._party.meeting.attempt()
        self._ready(attempt, 0)
        index, complete = 0, False
        try:
            while not complete:
                layout, block = self._next(attempt, version, index)
                index, complete = index + 1, layout.last
                if not complete:
                    self._ready(attempt, index)
                yield unpack(block, layout)
                del block  # its memory may be the next bucket's, where the caller has let go of it too
        finally:
            if not complete:
                self._party.leave_group()  # a block may be under way to here, and the trainer's end waits for it

    def _next(self, attempt: int, version: int, index: int) -> tuple[Layout, torch.Tensor]:
        meeting = self._party.meeting
        with waiting(self._party.name, on=f"the trainer's bucket {index} of version {version}"):
            meeting.wait(attempt, [f"{attempt}/{index}/layout"], missing=f"bucket {index} of version {version}")
        layout = Layout.from_json(cast(str, meeting.told(f"{attempt}/{index}/layout")))
        if layout.version != version:
            raise TransportError(
                "another version arrived", expected=f"version {version}", found=f"version {layout.version}"
            )
        group = self._party.group(attempt)
        block = self._memory.take(layout.num_bytes, group.device)
        group.broadcast(block, lambda: meeting.raise_if_over(attempt))
        return layout, block

    def _ready(self, attempt: int, index: int) -> None:
        self._party.meeting.tell(f"{attempt}/{index}/ready/{self._party.name}", True)

    def close(self) -> None:
        self._party.close()


class BroadcastTransport(JoinedTransport):
    """See the module; `kinds.transport.Transport`."""

    name = "broadcast"

    def __init__(self, options: BroadcastOptions) -> None:
        super().__init__(options.host, options.timeout_s)
        self._options = options
        self._generation = 0

    def ends(self, address: Address, source: WeightSource) -> Ends:
        self._generation = 0
        return Ends(
            sender=functools.partial(BroadcastSender, address),
            receiver=lambda index: functools.partial(BroadcastReceiver, address, index),
        )

    def joined(self, meeting: Meeting, parties: Sequence[str]) -> None:
        devices = {name: cast("str | None", meeting.told(f"device/{name}")) for name in parties}
        meeting.tell("wire", choose_wire(self._options.wire, devices))

    def failed(self, meeting: Meeting) -> None:
        # A collective may have been left half-way on some side; the next publish starts with a fresh group.
        self._generation += 1
        meeting.tell("generation", self._generation)


def choose_wire(wanted: str, devices: dict[str, str | None]) -> Wire:
    """NCCL needs a GPU of its own for each party; everything else goes through gloo and host memory.

    Args:
        wanted: ``auto``, ``gloo`` or ``nccl``.
        devices: Party -> id of its GPU, or None where it has none.
    """
    apart = None not in devices.values() and len(set(devices.values())) == len(devices)
    if wanted == "nccl" and not apart:
        raise TransportError(
            "NCCL cannot connect these parties",
            expected="a GPU of its own for trainer rank 0 and for each engine",
            found=", ".join(f"{name}: {device or 'none'}" for name, device in devices.items()),
            do="set transport.wire: gloo, or placement.mode: separate",
        )
    return "nccl" if apart and wanted != "gloo" else "gloo"


def _device_id(device: torch.device | None) -> str | None:
    """The same for the same GPU in every process, whatever index it has there."""
    return None if device is None else str(torch.cuda.get_device_properties(device).uuid)
