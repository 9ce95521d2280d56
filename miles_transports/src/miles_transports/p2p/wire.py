"""One process's Mooncake transfer engine: register memory, write into a peer's, and believe nothing unconfirmed.

Mooncake answers with return codes and never says what arrived: a failed batch may be written in part. So a write either
returns 0 for every chunk, or fails here; and whoever reads compares checksums of the bytes in place. A call to a peer
that hangs before its handshake takes a minute to fail, whatever its settings; nobody here waits longer than asked, and
memory of an abandoned call is never used again.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from miles_core.errors import TransportError

Protocol = Literal["tcp", "rdma"]

MAX_SEGMENTS = 256
"""Segments of one call. TCP lanes refuse some thousands at once, after having written part of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Memory that may be written into; travels over the control path."""

    endpoint: str
    """``host:port`` of the peer's transfer engine."""
    address: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes of a local buffer and where they go in the peer's."""

    offset: int
    num_bytes: int
    peer_offset: int


class Wire:
    """Thread-safe: several writes may run at once, from registered local memory."""

    def __init__(self, host: str, protocol: Protocol, device: str, *, timeout_s: float, retries: int) -> None:
        self._engine = _start(host, protocol, device, timeout_s)
        self.endpoint = f"{host}:{self._engine.get_rpc_port()}"
        self._retries = retries
        self._timeout_s = timeout_s
        self._registered: dict[int, torch.Tensor] = {}  # keeps registered memory alive
        self._lock = threading.Lock()
        self.retried = 0
        """Writes that had to be tried again, so far."""

    def register(self, buffer: torch.Tensor) -> Peer:
        """Make a contiguous uint8 buffer readable and writable for peers.

        Raises:
            TransportError: the transfer engine refused it.
        """
        address, num_bytes = buffer.data_ptr(), buffer.numel()
        with self._lock:
            code = self._engine.register_memory(address, num_bytes)
            if code != 0:
                raise TransportError(
                    "memory could not be registered for P2P writes",
                    found=f"return code {code} for {num_bytes:,} bytes",
                    where=self.endpoint,
                    do="with protocol rdma, raise the limit on locked memory (ulimit -l unlimited)",
                )
            self._registered[address] = buffer
        return Peer(endpoint=self.endpoint, address=address, num_bytes=num_bytes)

    def unregister(self, buffer: torch.Tensor) -> None:
        with self._lock:
            if self._registered.pop(buffer.data_ptr(), None) is not None:
                self._engine.unregister_memory(buffer.data_ptr())

    def write(self, buffer: torch.Tensor, peer: Peer, segments: Sequence[Segment], *, what: str) -> None:
        """Write segments of `buffer` and return once all are confirmed; failed calls are tried again as a whole.

        Args:
            what: Names the write in an error: which bucket, which engine.

        Raises:
            TransportError: a segment lies outside the peer's memory, or the retries are used up.
        """
        outside = [s for s in segments if s.peer_offset < 0 or s.peer_offset + s.num_bytes > peer.num_bytes]
        if outside:
            raise TransportError(
                f"{what}: a write would leave the engine's registered memory",
                expected=f"below {peer.num_bytes:,} bytes",
                found=f"[{outside[0].peer_offset:,}, {outside[0].peer_offset + outside[0].num_bytes:,})",
            )
        for start in range(0, len(segments), MAX_SEGMENTS):
            self._confirmed(buffer, peer, segments[start : start + MAX_SEGMENTS], what)

    def _confirmed(self, buffer: torch.Tensor, peer: Peer, segments: Sequence[Segment], what: str) -> None:
        sources = [buffer.data_ptr() + segment.offset for segment in segments]
        places = [peer.address + segment.peer_offset for segment in segments]
        sizes = [segment.num_bytes for segment in segments]
        began = time.monotonic()
        codes: list[int | None] = []
        while len(codes) <= self._retries:
            # Writing the same bytes to the same place again is harmless, whatever part of it had arrived.
            left = self._timeout_s - (time.monotonic() - began)
            code = _within(
                left, lambda: self._engine.batch_transfer_sync_write(peer.endpoint, sources, places, sizes), buffer
            )
            if code == 0:
                return
            codes.append(code)
            if code is None:
                break
            if len(codes) <= self._retries:
                self.retried += 1
                time.sleep(min(0.05 * 2 ** len(codes), 1.0))
        found = "no answer" if codes[-1] is None else f"return code {codes[-1]}"
        raise TransportError(
            f"{what}: the write failed",
            expected=f"confirmation within {self._timeout_s:g} s",
            found=f"{found} to try {len(codes)}, after {time.monotonic() - began:.1f} s",
            where=f"{self.endpoint} to {peer.endpoint}",
            do="see that the engine's process lives and that this host reaches it; transport.write_retries and "
            "transport.write_timeout_s say how long to insist",
        )

    def close(self) -> None:
        with self._lock:
            for address in self._registered:
                self._engine.unregister_memory(address)
            self._registered.clear()


def _within(seconds: float, call: Callable[[], int], keep: object) -> int | None:
    """The call's result, or None when it has not come back in time; its thread then ends whenever it does.

    Args:
        keep: Memory the call reads; lives as long as the call.
    """
    answer: queue.SimpleQueue[int] = queue.SimpleQueue()

    def run(keep: object) -> None:
        answer.put(call())

    threading.Thread(target=run, args=(keep,), daemon=True, name="p2p-write").start()
    try:
        return answer.get(timeout=max(0.0, seconds))
    except queue.Empty:
        return None


@functools.cache
def _start(host: str, protocol: Protocol, device: str, timeout_s: float) -> Any:
    """The process's transfer engine: one serves all ends, and takes a second to stop."""
    if protocol == "rdma" and not any(Path("/sys/class/infiniband").glob("*")):
        # Mooncake would fall back to TCP and say so only in its log.
        raise TransportError(
            "protocol rdma needs an RDMA device",
            found="nothing in /sys/class/infiniband",
            where=host,
            do="transport.protocol: tcp works without RDMA hardware",
        )
    seconds = str(max(1, round(timeout_s)))
    wanted = {"MC_TRANSFER_TIMEOUT": seconds, "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds}
    if protocol == "tcp":
        wanted["MC_FORCE_TCP"] = "1"
    with _defaults(wanted):
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise TransportError(
                "transport p2p needs Mooncake's transfer engine",
                found=str(error),
                do="pip install mooncake-transfer-engine (with CUDA) or mooncake-transfer-engine-non-cuda, never both; "
                "the system libraries libibverbs1, librdmacm1, libnuma1, libcurl4 and liburing2 belong to it",
            ) from error
        engine = TransferEngine()
        code = engine.initialize(host, "P2PHANDSHAKE", protocol, device)
    if code != 0:
        raise TransportError(
            f"the transfer engine did not start with protocol {protocol}",
            found=f"return code {code}",
            where=host,
            do="transport.device names the RDMA device; transport.host must be an address of this host",
        )
    return engine


@contextlib.contextmanager
def _defaults(values: dict[str, str]) -> Iterator[None]:
    """Set what the user's environment does not, while the engine starts: it reads its settings then."""
    absent = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(absent)
    try:
        yield
    finally:
        for name in absent:
            del os.environ[name]
