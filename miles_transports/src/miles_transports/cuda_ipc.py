"""Transport `cuda-ipc`: a trainer rank shows its buckets to the engines on its own GPU; no network takes part.

Each rank gathers every bucket anyway and serves the engines that share its device, through two blocks of shared memory
that it uses in turn: while the engines copy out of one, the next bucket is packed into the other. Without GPUs the
blocks are main memory and everything else is the same.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch

from miles_core.errors import TransportError
from miles_core.kinds.transport import WeightSource
from miles_core.types import WeightBucket
from miles_transports.joined import ENGINE_PATIENCE, Ends, JoinedTransport
from miles_transports.meeting import Address, Meeting
from miles_transports.memory import Recycled
from miles_transports.options import CudaIpcOptions
from miles_transports.packing import Layout, fill, layout_of, unpack
from miles_transports.shared_block import SharedBlock, open_block

BLOCKS = 2


def here() -> tuple[str, torch.device]:
    """Name of this process's host and GPU, the same in every process; and the GPU as this one counts it."""
    if not torch.cuda.is_available():
        return f"{socket.gethostname()} cpu", torch.device("cpu")
    device = torch.device("cuda", torch.cuda.current_device())
    return f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}", device


class CudaIpcSender:
    """`kinds.transport.SharedSender` of one trainer rank."""

    def __init__(self, address: Address, rank: int, world_size: int) -> None:
        self._name = f"trainer rank {rank}"
        self._rank = rank
        self._meeting = Meeting.join(address, self._name)
        place, self._device = here()
        self._meeting.tell(f"place/{rank}", place)
        if rank == 0:
            self._meeting.tell("world_size", world_size)
        self._blocks: dict[int, SharedBlock] = {}
        self._waits: dict[int, list[str]] = {}
        self._engines: list[int] = []
        self._read: list[str] = []  # keys that nobody needs any more; each removal is a question to the driver
        self._sent = 0
        self._attempt = 0

    def send(self, bucket: WeightBucket) -> None:
        meeting = self._meeting
        if bucket.index == 0:
            self._attempt, self._waits, self._sent = meeting.attempt(), {}, 0
            self._engines = self._served()
            stale, self._read = self._read, []
            meeting.forget(stale)
        meeting.raise_if_over(self._attempt)
        engines = self._engines
        if not engines:
            return
        slot = bucket.index % BLOCKS
        self._wait_for(slot)
        layout = layout_of(bucket)
        block = self._block(slot, layout.num_bytes)
        fill(block.bytes, bucket, layout)
        _synchronise(self._device)
        prefix = f"{self._attempt}/{self._rank}/{bucket.index}"
        self._waits[slot] = [f"{prefix}/taken/engine {engine}" for engine in engines]
        meeting.tell(f"{prefix}/layout", [layout.to_json(), block.handle])
        self._sent += layout.num_bytes * len(engines)

    def _served(self) -> list[int]:
        served = cast("list[int]", self._meeting.told("served_by"))
        return [engine for engine, rank in enumerate(served) if rank == self._rank]

    def _wait_for(self, slot: int) -> None:
        """Until every engine has copied what lies in the slot's block."""
        if keys := self._waits.pop(slot, []):
            bucket = keys[0].split("/")[2]
            self._meeting.wait(self._attempt, keys, missing=f"the taking of bucket {bucket}")
            self._read += [*keys, f"{self._attempt}/{self._rank}/{bucket}/layout"]
            self._blocks[slot].mapped()

    def _block(self, slot: int, num_bytes: int) -> SharedBlock:
        block = self._blocks.get(slot)
        if block is None or block.num_bytes < num_bytes:
            if block is not None:
                block.close()
            block = self._blocks[slot] = SharedBlock(max(num_bytes, 1), self._device)
        return block

    def finish(self, version: int) -> Mapping[str, float]:
        for slot in range(BLOCKS):
            self._wait_for(slot)
        return {"wire_bytes": float(self._sent)}

    def abort(self, reason: str) -> None:
        self._meeting.give_up(f"{self._name} gave up: {reason}")

    def close(self) -> None:
        self._meeting.leave()
        for block in self._blocks.values():
            block.close()
        self._blocks.clear()


class CudaIpcReceiver:
    """One engine's end."""

    def __init__(self, address: Address, engine: int) -> None:
        self._engine = engine
        self._meeting = Meeting.join(address, f"engine {engine}", patience=ENGINE_PATIENCE)
        place, self._device = here()
        self._meeting.tell(f"engine_place/{engine}", place)
        self._mapped: dict[int, tuple[str, torch.Tensor]] = {}  # by slot
        self._memory = Recycled()

    def receive(self, version: int) -> Iterator[WeightBucket]:
        meeting = self._meeting
        attempt = meeting.attempt()
        rank = cast("list[int]", meeting.told("served_by"))[self._engine]
        index, complete = 0, False
        while not complete:
            prefix = f"{attempt}/{rank}/{index}"
            meeting.wait(attempt, [f"{prefix}/layout"], missing=f"bucket {index} of version {version}")
            text, handle = cast("tuple[str, str]", meeting.told(f"{prefix}/layout"))
            layout = Layout.from_json(text)
            if layout.version != version:
                raise TransportError(
                    "another version arrived", expected=f"version {version}", found=f"version {layout.version}"
                )
            copy = self._memory.take(layout.num_bytes, self._device)
            copy.copy_(self._map(index % BLOCKS, handle)[: layout.num_bytes])
            _synchronise(self._device)
            meeting.raise_if_over(attempt)
            meeting.tell(f"{prefix}/taken/engine {self._engine}", True)
            index, complete = index + 1, layout.last
            yield unpack(copy, layout)
            del copy  # its memory may be the next bucket's, where the caller has let go of it too

    def _map(self, slot: int, handle: str) -> torch.Tensor:
        """The sender's block; mapped once, since it then loses its name, until a larger one takes its place."""
        if slot not in self._mapped or self._mapped[slot][0] != handle:
            self._mapped[slot] = handle, open_block(handle, self._device)
        return self._mapped[slot][1]

    def close(self) -> None:
        self._meeting.leave()
        self._mapped.clear()


class CudaIpcTransport(JoinedTransport):
    """See the module; `kinds.transport.Transport`."""

    name = "cuda-ipc"

    def __init__(self, options: CudaIpcOptions) -> None:
        super().__init__("127.0.0.1", options.timeout_s)

    def ends(self, address: Address, source: WeightSource) -> Ends:
        return Ends(
            senders=functools.partial(CudaIpcSender, address),
            receiver=lambda engine: functools.partial(CudaIpcReceiver, address, engine),
        )

    def joined(self, meeting: Meeting, parties: Sequence[str]) -> None:
        world_size = cast(int, meeting.told("world_size"))
        ranks = [cast(str, meeting.told(f"place/{rank}")) for rank in range(world_size)]
        engines = [cast(str, meeting.told(f"engine_place/{engine}")) for engine in range(len(parties) - 1)]
        meeting.tell("served_by", assign(ranks, engines))


def assign(ranks: Sequence[str], engines: Sequence[str]) -> list[int]:
    """The rank that serves each engine: one on its device, the ranks of a device in turn.

    Args:
        ranks, engines: Host and device of each.

    Raises:
        TransportError: an engine shares its device with no rank.
    """
    served_by = []
    for index, place in enumerate(engines):
        near = [rank for rank, found in enumerate(ranks) if found == place]
        if not near:
            raise TransportError(
                f"engine {index} shares its device with no trainer rank",
                expected=f"one of {', '.join(sorted(set(ranks)))}",
                found=place,
                where=f"engine {index}",
                do="set placement.mode: colocated on one host, or transport: broadcast",
            )
        served_by.append(near[sum(earlier == place for earlier in engines[:index]) % len(near)])
    return served_by


def _synchronise(device: torch.device) -> None:
    """Wait for copies in flight: the other side reads from another process, and knows nothing of our streams."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
