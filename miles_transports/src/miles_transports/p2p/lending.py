"""Registered memory of a receiver: peers write buckets into it, and whoever takes a bucket may keep it.

Nothing is copied out. A block comes back when the last tensor over it is gone; until then another takes its place. So
what is registered is the most that the caller ever held at once, and the few blocks that are written meanwhile.
"""

from __future__ import annotations

import weakref

import torch

from miles_transports.memory import fresh
from miles_transports.p2p.wire import Peer, Wire


class Block:
    """Registered bytes, and what a peer must know to write into them."""

    def __init__(self, wire: Wire, num_bytes: int) -> None:
        self.memory = fresh(max(num_bytes, 1))  # of a first offer nobody knows yet how large it must be
        self.bytes = torch.from_numpy(self.memory)
        self.peer: Peer = wire.register(self.bytes)


class Lending:
    """The blocks of one generation. `lend` and `close` are called by one thread; tensors may end in any."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._blocks: set[Block] = set()
        self._free: list[Block] = []

    def lend(self, num_bytes: int) -> Block:
        """A registered block of at least so many bytes that nobody holds."""
        free = [self._free.pop() for _ in range(len(self._free))]  # others only append
        free.sort(key=lambda block: block.peer.num_bytes)
        fits = next((at for at, block in enumerate(free) if block.peer.num_bytes >= num_bytes), None)
        if fits is not None:
            found = free.pop(fits)
        else:
            if free:
                self._drop(free.pop(0))  # the larger one takes its place
            found = Block(self._wire, num_bytes)
            self._blocks.add(found)
        self._free += free
        return found

    def give_back(self, block: Block) -> None:
        self._free.append(block)

    def hand_over(self, block: Block, num_bytes: int) -> torch.Tensor:
        """u8[num_bytes], the block's own memory; the block is free again when nothing views it any more."""
        view = block.memory[:num_bytes]
        weakref.finalize(view, self._free.append, block).atexit = False
        return torch.from_numpy(view)

    def close(self) -> None:
        """Nothing can be written into any block any more, not even into one that somebody holds."""
        for block in list(self._blocks):
            self._drop(block)

    def _drop(self, block: Block) -> None:
        self._blocks.discard(block)
        self._wire.unregister(block.bytes)
