"""The meeting point of a transport's ends: a small key-value store in the driver that says who is ready for what.

The control path runs over it, only payloads over the process group. So a party enters a collective only when all others
have said that they will, and whoever waits for the others can be told that they are not coming.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but torch lists no exports

from miles_core.errors import TransportError

CONNECT_TIMEOUT_S = 30.0
GLANCE_S = (0.00005, 1.2, 0.002)
"""First pause between two looks at what is waited for, its growth, and the longest: no wait is overslept by more than a
fifth. The store's own wait would be better, but prints two lines for each time that it gives up."""
OVER_S = 0.02
"""Between two looks at whether waiting is still worth it; each is a question to the driver's process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where the driver's store listens, and how patient everyone is. Travels to the ends by pickle."""

    host: str
    port: int
    timeout_s: float
    num_engines: int


class Pauses:
    """Between looks at what one waits for.

    Args:
        check: Called at once and then every `OVER_S`; raises when waiting has become pointless.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._length, self._growth, self._longest = GLANCE_S
        self._checked = -math.inf

    def next(self) -> None:
        if time.monotonic() - self._checked > OVER_S:
            self._check()
            self._checked = time.monotonic()
        time.sleep(self._length)
        self._length = min(self._length * self._growth, self._longest)


class Meeting:
    """One party's connection. Its calls come from one thread at a time."""

    def __init__(self, store: TCPStore, timeout_s: float) -> None:
        self.store = store
        self._timeout_s = timeout_s
        self._left = False
        self._mine = 0

    @staticmethod
    def host(host: str, timeout_s: float, num_engines: int) -> tuple[Meeting, Address]:
        """Open the store in this process on a port that the system picks, so that no port can be in use. Blocking.

        Raises:
            TransportError: `host` is no address of this host, which the store alone would find out by trying for long.
        """
        try:
            _bind(host)
            patience = timedelta(seconds=min(CONNECT_TIMEOUT_S, timeout_s))
            store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=patience)
        except (OSError, UnicodeError, dist.DistError) as error:
            raise TransportError(
                "the meeting point of trainer and engines could not be opened",
                expected="an address of this host",
                found=f"{host}: {str(error).splitlines()[0]}",
                where=f"host {socket.gethostname()}",
                do="set transport.host to an address of the driver's host that every other host reaches",
            ) from error
        address = Address(host=host, port=store.port, timeout_s=timeout_s, num_engines=num_engines)
        return Meeting(store, timeout_s), address

    @staticmethod
    def join(address: Address, who: str, *, patience: float = 1.0) -> Meeting:
        """Connect to the driver's store; wait `patience` times the address's time-out for others."""
        try:
            store = TCPStore(
                address.host,
                address.port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=min(CONNECT_TIMEOUT_S, address.timeout_s)),
            )
        except dist.DistError as error:
            raise TransportError(
                f"{who} cannot reach the driver at {address.host}:{address.port}",
                found=f"{type(error).__name__}: {str(error).splitlines()[0]}",
                where=f"host {socket.gethostname()}",
                do="set transport.host to an address of the driver's host that every other host reaches",
            ) from error
        return Meeting(store, address.timeout_s * patience)

    def attempt(self) -> int:
        """Number of the publish in progress, or of the last one; from now on the one that `give_up` ends."""
        self._mine = int(self.store.get("attempt"))
        return self._mine

    def give_up(self, reason: str) -> None:
        """End the attempt that this party takes part in. It may be late, and another in progress by now."""
        self.end(self._mine, reason)

    def end(self, attempt: int, reason: str) -> None:
        """End an attempt for everybody; the first reason stays."""
        self.store.compare_set(f"{attempt}/over", "", reason)

    def raise_if_over(self, attempt: int) -> None:
        reason = self.store.get(f"{attempt}/over").decode() if self.store.check([f"{attempt}/over"]) else ""
        if self._left:
            reason = "this end was closed"
        if reason:
            raise TransportError("the publish is over before it is complete", found=reason)

    def wait(self, attempt: int, keys: Sequence[str], *, missing: str) -> None:
        """Wait until all `keys` exist.

        Raises:
            TransportError: the attempt is over, or the time-out passed; the message then lists the absent keys' owners.
        """
        deadline = time.monotonic() + self._timeout_s
        pauses = Pauses(lambda: self.raise_if_over(attempt))
        while not self.store.check(list(keys)):
            if time.monotonic() > deadline:
                absent = [key.rpartition("/")[2] for key in keys if not self.store.check([key])]
                raise TransportError(
                    f"{missing} did not come within {self._timeout_s:g} s",
                    found=f"nothing from {', '.join(absent)}",
                    do="look at that process's log, or raise transport.timeout_s",
                )
            pauses.next()

    def tell(self, key: str, value: object) -> None:
        self.store.set(key, json.dumps(value))

    def told(self, key: str) -> object:
        return json.loads(self.store.get(key))

    def forget(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.store.delete_key(key)

    def leave(self) -> None:
        """Make every wait in this party raise; callable from another thread."""
        self._left = True


def _bind(host: str) -> None:
    """Raise unless this host listens under one of the addresses of `host`. Looking a name up blocks."""
    refusal: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
            return
        except OSError as error:
            refusal = error
    if refusal is not None:
        raise refusal


def own_address(host: str, port: int) -> str:
    """The address this host is seen under on its way to the driver: the interface that is known to work."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        probe.connect((host, port))  # UDP: chooses a route, sends nothing
        return str(probe.getsockname()[0])
