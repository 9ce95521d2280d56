"""Transport: moves one complete weight version from the trainer to every engine, or nothing at all.

The `Transport` itself lives in the driver. It builds two kinds of ends, in the processes where they are needed: one
`Sender` in trainer rank 0 (or one in every rank), and one `Receiver` in each engine. The functions that make them
travel to those processes and must be picklable: a class, or ``functools.partial(Class, ...)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from miles_core.types import WeightBucket, WeightManifest

if TYPE_CHECKING:
    from miles_core.kinds.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """What a publish moved: the sender's account, and those of the engines in the order in which `open` got them."""

    sent: WeightManifest
    received: tuple[WeightManifest, ...]


class Sender(Protocol):
    """The trainer's end, in rank 0. All calls come from the thread that built it."""

    def send(self, bucket: WeightBucket) -> None:
        """Move one bucket. Its tensors may be the live parameters themselves: keep no reference to them.

        Raises:
            TransportError: a receiver failed or is gone, or the publish was given up.
        """
        ...

    def abort(self, reason: str) -> None:
        """Tell the receivers that the version will not be completed. Never raises; may be called more than once."""
        ...

    def close(self) -> None: ...


class SharedSender(Sender, Protocol):
    """The end of one rank, where every trainer rank has one (`WeightSource.open_senders`).

    It gets every bucket that its rank exports, and moves its own share: to its own engines, or the tensors it owns.
    """

    def finish(self, version: int) -> Mapping[str, float]:
        """Wait until everything of this end has arrived. Called after the last bucket.

        Returns:
            What it cost, for `WeightManifest.figures`.

        Raises:
            TransportError: something did not arrive. A failure in the background must be raised here at the latest.
        """
        ...


class Receiver(Protocol):
    """An engine's end, in the engine's process. Its calls block; engines make them in a worker thread."""

    def receive(self, version: int) -> Iterator[WeightBucket]:
        """Yield the buckets of a version in order, the last one marked as such. The caller owns their tensors.

        Raises:
            TransportError: the sender gave up, is gone, or sent another version.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class FolderReceiver(Receiver, Protocol):
    """A receiver that can also build the version as a Hugging Face folder, for engines with the tag `reads-disk`."""

    def materialise(self, version: int) -> Path:
        """The complete folder of `version` on this host. It stays until the version after the next one is received;
        what is mapped of it then keeps its bytes.

        Raises:
            TransportError: the version cannot be built from what is published.
        """
        ...


class WeightSource(Protocol):
    """The trainer as a transport sees it."""

    @property
    def model_path(self) -> str:
        """The checkpoint that trainer and engines started from, as every host sees it."""
        ...

    async def open_sender(self, make: Callable[[], Sender]) -> None:
        """Build the sending end in trainer rank 0. It replaces an earlier one, and lives as long as the trainer."""
        ...

    async def open_senders(self, make: Callable[[int, int], SharedSender]) -> None:
        """The same with a sending end in every rank: ``make(rank, world_size)``."""
        ...

    async def send_weights(self, version: int) -> WeightManifest:
        """Export the current weights on all ranks, and send each bucket through the sender of rank 0 or of each rank.

        Raises:
            TransportError: a sender failed; or, with several of them, ranks hold different values of one tensor.
        """
        ...


class Transport(Protocol):
    """Created in the driver as ``Transport(options)``. It connects the ends and lets them move weights. The driver
    pauses engines and activates versions."""

    async def open(self, source: WeightSource, engines: Sequence[Engine]) -> None:
        """Connect trainer and engines. After a `close` it may be called again, with other engines."""
        ...

    async def publish(self, version: int) -> Staged:
        """Stage the trainer's weights as `version` on every engine, and return the accounts of both sides. Most of the
        work is done by `weights.staging.stage`.

        Raises:
            TransportError: not every engine staged it completely, so none may be activated.
        """
        ...

    async def close(self) -> None: ...
