"""What a wire protocol is to the server: how a request is read, and how an answer is written, whole or in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from miles_core.kinds.environment import Completion
from miles_core.kinds.tito_family import Delta
from miles_core.session.serving.asked import Asked
from miles_core.session.serving.problems import Refused
from miles_core.session.serving.store import Entry

Event = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What an answer needs beside the completion."""

    response_id: str
    model: str
    created: int
    """Unix time."""
    asked: Asked


class Writer(Protocol):
    """Writes one streamed answer."""

    def start(self) -> Iterator[Event]: ...

    def delta(self, delta: Delta) -> Iterator[Event]: ...

    def end(self, completion: Completion, logprobs: list[Event] | None) -> Iterator[Event]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WireProtocol:
    name: str
    path: str
    """Below the session's base URL."""
    id_prefix: str
    read: Callable[[Mapping[str, Any], Entry], Asked]
    """Raises `Refused`."""
    whole: Callable[[Completion, Reply, list[Event] | None], Event]
    """The body of an answer that is not streamed; the last argument are its log-probs if asked for."""
    writer: Callable[[Reply, int], Writer]
    """For a prompt of so many tokens."""
    error: Callable[[Refused], Event]
    named_events: bool
    """Streams carry ``event:`` lines with each event's type, and no ``[DONE]``."""
