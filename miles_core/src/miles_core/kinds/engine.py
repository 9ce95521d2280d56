"""Engine: samples tokens, token ids in, token ids out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from miles_core.kinds.transport import Receiver
from miles_core.types import FinishReason, SamplingParams, WeightManifest

PauseMode = Literal["retract", "in-place", "abort"]
"""What a pause does to the requests in flight: see `Engine.pause`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    request_id: str
    session_id: str
    """Turns of one session share it, so that an engine can reuse their prefix."""
    token_ids: Sequence[int]
    """Immutable. Sessions pass a compact row (`session.row.TokenIds`); ``list()`` of it is the fast way to Python
    ints."""
    params: SamplingParams
    continued: int = 0
    """Trailing tokens of `token_ids` that were sampled already, by an engine that was lost: stop strings may begin in
    them, and routes cover them like the rest of the prompt."""
    routes: bool = False
    """Return the experts of every MoE layer (tag `records-routes`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Sampled tokens, in order. The last chunk of a request carries the finish reason (and may carry no token)."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of each sampled token under the temperature-scaled, full-vocabulary policy; never renormalised after
    top-p/top-k."""
    weight_version: int
    """Version that sampled all tokens of this chunk."""
    finish_reason: FinishReason | None = None
    routes: npt.NDArray[np.integer[Any]] | None = None
    """Last chunk only: [prompt + output - 1, L, K], see `Trajectory.routes`. A row holds the experts of the pass that
    computed the position first: preemption and other weights recompute key-values, never recorded rows."""
    cached_tokens: int = 0
    """Last chunk only: prompt tokens whose KV was reused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """What the executor tells an engine at creation."""

    model_path: str
    context_length: int | None
    """Tokens of prompt plus output; None means the checkpoint's own limit."""
    device: str
    """``cpu`` or ``cuda:0``."""
    seed: int
    index: int = 0
    routes: bool = False
    """Requests will ask for routes: an engine that must know beforehand (tag `records-routes`) does here."""
    true_on_policy: bool = False
    """Compute log-probs that the trainer reproduces bit for bit (tag `true-on-policy`)."""
    log_dir: str | None = None
    """Folder for logs of processes the engine starts; None outside a run."""


class Engine(Protocol):
    """Created as ``Engine(options, context)``; asynchronous.

    Life: created -> serving; ``pause`` -> paused -> ``begin_update`` -> updating -> ``activate`` -> paused ->
    ``resume``.
    Weights become visible only through `activate`, only when the version is complete, and all at once.
    """

    async def start(self) -> None:
        """Load the checkpoint and become ready to generate, at weight version -1 (nothing published yet)."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Sample. Closing the iterator early aborts the request.

        Raises:
            EngineError: the request does not fit the context, or the engine is closed.
        """
        ...

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Stop between tokens; requests that arrive meanwhile wait. Idempotent.

        ``retract`` returns requests in flight to the queue: their KV is dropped and recomputed from ids on resume,
        their sampled tokens and log-probs are kept. ``in-place`` (tag `pauses-in-place`) freezes them with their KV,
        which an `activate` leaves alone: they go on under the new weights over the old KV, and nothing else may reuse
        it.
        ``abort`` ends every one with `FinishReason.ABORT` and the tokens it has.
        """
        ...

    async def resume(self) -> None:
        """Go on. KV of an older weight version is never continued, but for requests frozen in place. Idempotent."""
        ...

    async def open_receiver(self, make: Callable[[], Receiver]) -> None:
        """Build the transport's receiving end in this process and keep it until the next one or the engine's end, which
        close it: the transport is connected anew for an engine that joins."""
        ...

    async def receive(self, version: int) -> WeightManifest:
        """Take buckets from the receiver into a staging area until the one marked last.

        Raises:
            EngineError: a tensor is unknown, of another shape or dtype, sent twice, or missing at the end. The serving
                weights are untouched and the staged ones dropped.
        """
        ...

    async def activate(self, version: int) -> None:
        """Swap the staged version in, flush every cache of the old one (but the KV of requests frozen in place), serve
        `version` from the next token on.

        Raises:
            EngineError: that version is not staged completely.
        """
        ...

    async def version(self) -> int: ...

    async def scramble(self, seed: int) -> None:
        """Overwrite every weight with noise (tag `verifies-weights`); the next published version must replace it
        all."""
        ...

    async def digests(self, names: Collection[str] | None = None) -> Mapping[str, str]:
        """Digests (`weights.digests.digest_tensor`) of the tensors the engine serves with *now*, under their Hugging
        Face names (tag `verifies-weights`).

        They tell of the live weights, never of the copy that was received. An engine with fused or sharded layouts
        answers for the parts: it slices them out of the live tensor, or asks its server for a checksum of the fused
        one, rebuilds from the received parts what that must be, and reports the parts' digests where the two agree.

        Args:
            names: Only these, where there are many; None is all.
        """
        ...

    async def stats(self) -> Mapping[str, float]:
        """Gauges for the display: running, waiting, tokens sampled, cached tokens."""
        ...

    async def close(self) -> None: ...
