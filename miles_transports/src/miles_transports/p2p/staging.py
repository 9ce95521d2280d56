"""Registered memory of a source: a ring of pieces, of which one is packed while those before it are written."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future

import torch

from miles_transports.memory import fresh
from miles_transports.p2p.wire import Wire

PIECES = 4
"""In the ring: one is packed, one is written, and neither waits for the other at once when it takes a little longer."""


class Staging:
    """Of constant size, however many engines and buckets there are. Used by one thread."""

    def __init__(self, wire: Wire, piece_bytes: int) -> None:
        self._wire, self.piece_bytes = wire, piece_bytes
        self._memory = torch.from_numpy(fresh(PIECES * piece_bytes))
        wire.register(self._memory)
        self._written: deque[list[Future[None]]] = deque()
        """What each piece is read by, the oldest first."""
        self._next = 0

    def blocks(self) -> Iterator[torch.Tensor]:
        """u8[piece_bytes] that nothing reads any more, again and again; raises what the writes of it did."""
        while True:
            self.settle(leave=PIECES - 1)
            begin, self._next = self._next * self.piece_bytes, (self._next + 1) % PIECES
            self._written.append([])
            yield self._memory[begin : begin + self.piece_bytes]

    def read_by(self, write: Future[None]) -> None:
        """The block that was taken last may not change before `write` is done."""
        self._written[-1].append(write)

    def settle(self, leave: int = 0) -> None:
        """Wait for the writes of all blocks but the `leave` last ones; raise what failed."""
        while len(self._written) > leave:
            for write in self._written.popleft():
                write.result()

    def close(self) -> None:
        """A write that was given up may still read the memory; its thread keeps that alive."""
        self._wire.unregister(self._memory)
