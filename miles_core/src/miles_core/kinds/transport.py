"""Transport: moves one complete weight version to every engine, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from miles_core.types import WeightBucket, WeightManifest

if TYPE_CHECKING:
    from miles_core.kinds.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """What one publish moved: the sender's account, and that of every engine in the order given to `open`."""

    sent: WeightManifest
    received: tuple[WeightManifest, ...]


class Sender(Protocol):
    """The trainer's end; lives in trainer rank 0. All calls come from the thread that built it."""

    def send(self, bucket: WeightBucket) -> None:
        """Move one bucket. The tensors may alias live parameters: keep no reference to them after returning.

        Raises:
            TransportError: a receiver failed or vanished, or the publish was abandoned.
        """
        ...

    def abort(self, reason: str) -> None:
        """Tell the receivers that the version in progress will not be completed. Never raises; may be called twice."""
        ...

    def close(self) -> None: ...


class SharedSender(Sender, Protocol):
    """One of several sending ends, one in each trainer rank (`WeightSource.open_senders`).

    Every rank is handed every bucket it exports and moves its own share: its targets, or the tensors it owns.
    """

    def finish(self, version: int) -> Mapping[str, float]:
        """Return once nothing of this end is in flight any more; called after the last bucket.

        Returns:
            What it cost, for `WeightManifest.figures`.

        Raises:
            TransportError: something did not arrive. A failure in the background is never only logged.
        """
        ...


class Receiver(Protocol):
    """An engine's end; lives in the engine's process. Blocking: engines call it from a worker thread."""

    def receive(self, version: int) -> Iterator[WeightBucket]:
        """Yield the version's buckets in order, the last one marked so. The tensors belong to the caller from then on.

        Raises:
            TransportError: the sender aborted, vanished, or sent another version.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class FolderReceiver(Receiver, Protocol):
    """A receiver that can also leave the version as a Hugging Face folder, for engines that load from disk
    (tag `reads-disk`)."""

    def materialise(self, version: int) -> Path:
        """The complete folder of `version` on this host; it stays as it is until the version after the next one is
        received.

        Raises:
            TransportError: the version cannot be built from what is published; nothing half-built is returned.
        """
        ...


class WeightSource(Protocol):
    """The trainer as a transport sees it."""

    @property
    def model_path(self) -> str:
        """The checkpoint that trainer and engines started from, as every host sees it."""
        ...

    async def open_sender(self, make: Callable[[], Sender]) -> None:
        """Build the sending end in trainer rank 0 and keep it for the trainer's life."""
        ...

    async def open_senders(self, make: Callable[[int, int], SharedSender]) -> None:
        """Build a sending end in every rank, ``make(rank, world_size)``; takes the place of `open_sender`."""
        ...

    async def send_weights(self, version: int) -> WeightManifest:
        """Export the current weights on all ranks and push each bucket through rank 0's sender, or each rank's own.

        Raises:
            TransportError: with several senders, also when ranks hold different values of one tensor.
        """
        ...


class Transport(Protocol):
    """Created in the driver as ``Transport(options)``. It joins the two ends; pausing and activating are not its
    business."""

    async def open(self, source: WeightSource, engines: Sequence[Engine]) -> None:
        """Connect once, before the first publish."""
        ...

    async def publish(self, version: int) -> Staged:
        """Stage `version` on every engine; return what each side accounts for. `weights.staging.stage` does most of it.

        Raises:
            TransportError: some engine did not stage it completely; none may be activated.
        """
        ...

    async def close(self) -> None: ...


SenderFactory = Callable[[], Any]
"""Must be picklable for executors with processes of their own: a class, or ``functools.partial(Class, ...)``."""
