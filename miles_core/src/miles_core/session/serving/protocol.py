"""What the server needs of a wire protocol: how to read a request, and how to write an answer, whole or in pieces."""

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
    """What an answer contains besides the completion."""

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
    """The body of an answer that is not streamed. The last argument holds its log-probs, if they were asked for."""
    writer: Callable[[Reply, int], Writer]
    """The body for a prompt of so many tokens."""
    error: Callable[[Refused], Event]
    named_events: bool
    """Whether streams have ``event:`` lines with the type of each event, and no ``[DONE]``."""
