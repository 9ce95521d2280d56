"""One trainer rank: a backend and, on rank 0, the sending end of the transport; synchronous, one thread.

Executors differ in where this object lives (a thread, a Ray actor), not in what it does. Errors leave it with the rank
in `where`, and always as a `MilesError`: an arbitrary exception may not survive the way to the driver's process.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from miles_core.errors import MilesError, RunError, TransportError
from miles_core.kinds.backend import Backend
from miles_core.kinds.executor import TrainerSpec
from miles_core.kinds.transport import Sender, SharedSender
from miles_core.registry import load_target
from miles_core.types import WeightBucket, WeightManifest
from miles_core.weights.digests import digest_tensors, name_some
from miles_core.weights.stopwatch import Stopwatch

RANK_METHODS = frozenset(
    {
        *("log_probs", "route_counts", "train_step", "save", "load", "save_hf", "offload", "onload"),
        *("open_sender", "open_senders", "send_weights", "close"),
    }
)
"""What an executor may ask of a rank by name."""
OWN_METHODS = frozenset({"open_sender", "open_senders", "send_weights", "close"})
"""Those that the host answers; the others are the backend's."""


@contextlib.contextmanager
def located(where: str, doing: str, foreign: type[MilesError] = RunError) -> Iterator[None]:
    """Put `where` in front of the `where` of every error that leaves the block; other exceptions become `foreign`."""
    try:
        yield
    except MilesError as error:
        error.where = f"{where}; {error.where}" if error.where else where
        raise
    except Exception as error:
        raise foreign(
            f"{doing} failed: {type(error).__name__}: {error}", found=_last_frame(error), where=where
        ) from error


def _last_frame(error: Exception) -> str | None:
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return None
    last = frames[-1]
    return f"raised at {Path(last.filename).name}:{last.lineno} in {last.name}: {last.line}"


def device_of(device: str, index: int = 0) -> str:
    """Name of the device as torch writes it: ``cpu`` or ``cuda:<index>``."""
    return f"cuda:{index}" if device == "cuda" else device


class RankHost:
    """Owns one rank's backend for its life. Every method runs in the thread that created the host.

    Args:
        spec: What the driver resolved.
        rank: This rank, below ``spec.world_size``; torch.distributed is initialised before when there are several.
        device: ``cpu`` or ``cuda:<index>`` as this process sees it.
    """

    def __init__(self, spec: TrainerSpec, *, rank: int, device: str) -> None:
        self.where = f"trainer rank {rank}"
        self._rank, self._world_size = rank, spec.world_size
        self._sender: Sender | None = None
        self._shared: SharedSender | None = None
        context = spec.context(rank, device=device)
        with located(self.where, "starting the backend"):
            self._backend: Backend = load_target(spec.load)(spec.options, context)

    def run(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call one of `RANK_METHODS` by name; this object's own method where it has one, else the backend's."""
        if method not in RANK_METHODS:
            raise RunError(f"a trainer rank has no method {method!r}", where=self.where)
        owner = self if method in OWN_METHODS else self._backend
        with located(self.where, method):
            return getattr(owner, method)(*args, **kwargs)

    def open_sender(self, make: Callable[[], Sender]) -> None:
        """Build the sending end here; on rank 0 only."""
        self._close_sender()
        self._sender = make()

    def open_senders(self, make: Callable[[int, int], SharedSender]) -> None:
        """Build this rank's sending end; on every rank."""
        self._close_sender()
        self._sender = self._shared = make(self._rank, self._world_size)

    def send_weights(self, version: int) -> WeightManifest | None:
        """Export on all ranks; a rank with a sender pushes every bucket and accounts for it, others return None.

        When sending fails the export is drained nonetheless: the other ranks are in its collectives.
        """
        buckets = self._backend.export(version)
        if self._sender is None and self._rank != 0:
            _drain(buckets)
            return None
        if self._sender is None:
            raise TransportError("this rank has no sender", do="open the transport before the first publish")
        # Where each rank has a sender, it counts the bytes that it alone answers for: together they are the model's.
        account, clock = _Account(version, self._counts if self._shared is not None else lambda _: True), Stopwatch()
        try:
            for bucket in clock.timed("prepare_s", buckets):
                with clock.running("digest_s"):
                    account.add(bucket)
                try:
                    with clock.running("move_s"):
                        self._sender.send(bucket)
                except Exception:
                    self._sender.abort(f"sending bucket {bucket.index} of version {version} failed")
                    _drain(buckets)
                    raise
            with clock.running("move_s"):
                figures = self._shared.finish(version) if self._shared is not None else {}
            return account.manifest({**clock.seconds, **figures})
        except BaseException as error:
            self._sender.abort(f"{type(error).__name__}: {error}")
            raise

    def _counts(self, bucket: WeightBucket) -> bool:
        return bucket.owner(self._world_size) == self._rank

    def _close_sender(self) -> None:
        sender, self._sender, self._shared = self._sender, None, None
        if sender is not None:
            sender.close()

    def close(self) -> None:
        """Close both ends; safe to call twice."""
        self._close_sender()
        self._backend.close()


def _drain(buckets: Iterator[WeightBucket]) -> None:
    for _ in buckets:
        pass


class _Account:
    """What has been exported of one version; refuses a malformed stream before an engine sees it."""

    def __init__(self, version: int, counts: Callable[[WeightBucket], bool]) -> None:
        self._version, self._counts = version, counts
        self._digests: dict[str, str] = {}
        self._num_bytes = 0
        self._next_index = 0
        self._complete = False

    def add(self, bucket: WeightBucket) -> None:
        problem = None
        if self._complete:
            problem = f"bucket {bucket.index} follows the one marked last"
        elif bucket.version != self._version:
            problem = f"bucket {bucket.index} is of version {bucket.version}"
        elif bucket.index != self._next_index:
            problem = f"bucket {bucket.index} comes where {self._next_index} is due"
        elif again := self._exported_again(bucket):
            problem = f"tensors exported twice: {name_some(again)}"
        if problem:
            raise self._error(problem)
        self._digests |= digest_tensors(bucket.tensors)
        if self._counts(bucket):
            self._num_bytes += sum(named.tensor.nbytes for named in bucket.tensors)
        self._next_index += 1
        self._complete = bucket.last

    def _exported_again(self, bucket: WeightBucket) -> list[str]:
        counts = Counter(named.name for named in bucket.tensors)
        return [name for name, count in counts.items() if count > 1 or name in self._digests]

    def manifest(self, figures: Mapping[str, float]) -> WeightManifest:
        if not self._complete:
            raise self._error(f"{self._next_index} buckets, none marked last")
        return WeightManifest(version=self._version, digests=self._digests, num_bytes=self._num_bytes, figures=figures)

    def _error(self, problem: str) -> TransportError:
        return TransportError(
            f"the backend's export of version {self._version} is malformed",
            expected="buckets of one version, numbered from 0, each tensor once, exactly the final one marked last",
            found=problem,
            do="fix the backend's `export`",
        )
