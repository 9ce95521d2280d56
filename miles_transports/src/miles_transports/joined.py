"""The driver's side of a transport whose ends are joined by a `Meeting`: connect, count attempts, end them.

A transport is such a `JoinedTransport` that says how its ends are made, and what surrounds an attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from miles_core.errors import TransportError
from miles_core.kinds.engine import Engine
from miles_core.kinds.transport import Receiver, Sender, SharedSender, Staged, WeightSource
from miles_core.types import WeightManifest
from miles_core.watch import waiting
from miles_core.weights.staging import stage
from miles_transports.meeting import Address, Meeting

ENGINE_PATIENCE = 2.0
"""Engines wait longer than the sender: it alone knows who is missing, so it must be the first to give up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """How the two ends are made, in their processes; everything here is picklable. Exactly one sending way is given."""

    sender: Callable[[], Sender] | None = None
    """In trainer rank 0."""
    senders: Callable[[int, int], SharedSender] | None = None
    """In every rank: ``(rank, world_size)``."""
    receiver: Callable[[int], Callable[[], Receiver]]
    """By the engine's position."""


class JoinedTransport:
    """`kinds.transport.Transport`, less what a subclass adds."""

    name = "transport"

    def __init__(self, host: str, timeout_s: float) -> None:
        self._host, self._timeout_s = host, timeout_s
        self._meeting: Meeting | None = None
        self._source: WeightSource | None = None
        self._engines: Sequence[Engine] = ()
        self._attempt = 0

    def ends(self, address: Address, source: WeightSource) -> Ends:
        """Say how the ends are made."""
        raise NotImplementedError

    def joined(self, meeting: Meeting, parties: Sequence[str]) -> None:
        """All have joined; the place to agree on something once."""

    def begin(self, meeting: Meeting, version: int) -> None:
        """An attempt is about to begin; blocking, in a thread."""

    def sent(self, meeting: Meeting, attempt: int, manifest: WeightManifest) -> WeightManifest:
        """The trainer has sent everything; blocking, in a thread. Returns the manifest, with more figures perhaps."""
        return manifest

    def failed(self, meeting: Meeting) -> None:
        """The attempt failed, whoever is at fault."""

    def staged(self, version: int) -> None:
        """The attempt succeeded on every engine; blocking, in a thread."""

    async def open(self, source: WeightSource, engines: Sequence[Engine]) -> None:
        meeting, address = await asyncio.to_thread(Meeting.host, self._host, self._timeout_s, len(engines))
        self._attempt = 0
        meeting.tell("attempt", 0)
        meeting.end(0, "no publish has begun")
        ends = self.ends(address, source)
        meeting.tell("generation", 0)
        opening: list[Any] = []
        if ends.sender is not None:
            opening.append(source.open_sender(ends.sender))
        elif ends.senders is not None:
            opening.append(source.open_senders(ends.senders))
        opening += [engine.open_receiver(ends.receiver(index)) for index, engine in enumerate(engines)]
        with waiting(f"{self.name} transport", on="trainer and engines to join"):
            outcomes = await asyncio.gather(*opening, return_exceptions=True)
        names = ["trainer", *(f"engine {index}" for index in range(len(engines)))]
        for name, outcome in zip(names, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                raise TransportError(
                    f"{name} did not join the {self.name}", found=f"{type(outcome).__name__}: {outcome}", where=name
                ) from outcome
        self.joined(meeting, names)
        self._meeting, self._source, self._engines = meeting, source, tuple(engines)

    async def publish(self, version: int) -> Staged:
        meeting, source = self._meeting, self._source
        if meeting is None or source is None:
            raise TransportError("the transport is not open", do="await open(source, engines) first")
        self._attempt += 1
        attempt = self._attempt
        await asyncio.to_thread(self.begin, meeting, version)
        meeting.tell("attempt", attempt)
        try:
            return await self._staged(meeting, source, attempt, version)
        except BaseException:
            self.failed(meeting)
            raise
        finally:
            meeting.end(attempt, "no publish is in progress")
            meeting.forget([f"{attempt - 1}/over"])

    async def _staged(self, meeting: Meeting, source: WeightSource, attempt: int, version: int) -> Staged:
        then = _Then(source, lambda manifest: self.sent(meeting, attempt, manifest))
        staged = await stage(then, self._engines, version, abandon=lambda reason: meeting.end(attempt, reason))
        await asyncio.to_thread(self.staged, version)
        return staged

    async def close(self) -> None:
        if self._meeting is not None:
            self._meeting.end(self._attempt, "the transport is closed")
        self._meeting = self._source = None


class _Then:
    """The source; after its weights are sent, something more is done before they count as sent."""

    def __init__(self, source: WeightSource, sent: Callable[[WeightManifest], WeightManifest]) -> None:
        self._source, self._sent = source, sent

    async def open_sender(self, make: Callable[[], Sender]) -> None:
        await self._source.open_sender(make)

    async def open_senders(self, make: Callable[[int, int], SharedSender]) -> None:
        await self._source.open_senders(make)

    @property
    def model_path(self) -> str:
        return self._source.model_path

    async def send_weights(self, version: int) -> WeightManifest:
        manifest = await self._source.send_weights(version)
        return await asyncio.to_thread(self._sent, manifest)
