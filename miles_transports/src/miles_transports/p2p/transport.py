"""Transport `p2p` in the driver: joins the ends, and compares what each engine holds with what was sent."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import Any

from miles_core.errors import TransportError
from miles_core.kinds.engine import Engine
from miles_core.kinds.transport import Staged, WeightSource
from miles_core.watch import waiting
from miles_core.weights.digests import compare
from miles_core.weights.staging import stage
from miles_transports.meeting import Meeting
from miles_transports.options import P2pOptions
from miles_transports.p2p.ends import P2pReceiver, P2pSender


class P2pTransport:
    """See the package; `kinds.transport.Transport`."""

    def __init__(self, options: P2pOptions) -> None:
        self._options = options
        self._meeting: Meeting | None = None
        self._source: WeightSource | None = None
        self._engines: Sequence[Engine] = ()
        self._attempt = 0
        self._generation = 0

    async def open(self, source: WeightSource, engines: Sequence[Engine]) -> None:
        meeting, address = Meeting.host(self._options.host, self._options.timeout_s, len(engines))
        meeting.tell("attempt", 0)
        meeting.tell("generation", 0)
        meeting.end(0, "no publish has begun")
        opening: list[Any] = [source.open_senders(functools.partial(P2pSender, address, self._options))]
        for index, engine in enumerate(engines):
            opening.append(engine.open_receiver(functools.partial(P2pReceiver, address, self._options, index)))
        with waiting("p2p transport", on="trainer and engines to join"):
            outcomes = await asyncio.gather(*opening, return_exceptions=True)
        names = ["trainer", *(f"engine {index}" for index in range(len(engines)))]
        for name, outcome in zip(names, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                raise TransportError(
                    f"{name} did not join the P2P transfer", found=f"{type(outcome).__name__}: {outcome}", where=name
                ) from outcome
        self._meeting, self._source, self._engines = meeting, source, tuple(engines)

    async def publish(self, version: int) -> Staged:
        meeting, source = self._meeting, self._source
        if meeting is None or source is None:
            raise TransportError("the transport is not open", do="await open(source, engines) first")
        self._attempt += 1
        attempt = self._attempt
        meeting.tell("attempt", attempt)
        try:
            staged = await stage(source, self._engines, version, abandon=lambda reason: meeting.end(attempt, reason))
            _verify(staged)
        except BaseException:
            # A write may be on its way still; nothing that it could reach is used again.
            self._generation += 1
            meeting.tell("generation", self._generation)
            raise
        finally:
            meeting.end(attempt, "no publish is in progress")
            meeting.forget([f"{attempt - 1}/over"])
        return staged

    async def close(self) -> None:
        if self._meeting is not None:
            self._meeting.end(self._attempt, "the transport is closed")
        self._meeting = self._source = None


def _verify(staged: Staged) -> None:
    """One-sided writes tell their receiver nothing: a short one is found by the digests of what lies there.

    Raises:
        TransportError: naming the engine and the tensors.
    """
    for index, received in enumerate(staged.received):
        if differences := compare(staged.sent.digests, received.digests):
            raise TransportError(
                f"engine {index} does not hold what was written to it",
                found=str(differences),
                where=f"engine {index}, version {received.version}",
                do="the engines keep serving the version they had; publish again, and look at that host's network",
            )
