"""Engine: samples tokens. Token ids go in, token ids come out; text is no concern of an engine."""

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
    """The same for all turns of a session, so that an engine can reuse their common prefix."""
    token_ids: Sequence[int]
    """The prompt; never changed. Sessions pass a compact `session.row.TokenIds`, of which ``list()`` quickly makes
    Python integers."""
    params: SamplingParams
    continued: int = 0
    """How many tokens at the end of the prompt belong to the answer: another engine sampled them before it was lost. A
    stop string may begin within them."""
    routes: bool = False
    """Whether to return the experts that each MoE layer chose (tag `records-routes`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The next sampled tokens of a request. The last chunk has the finish reason, and may have no tokens."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-prob of each token under the full-vocabulary policy at the sampling temperature; top-p, top-k and min-p do
    not change it."""
    weight_version: int
    """The version that sampled all tokens of this chunk."""
    finish_reason: FinishReason | None = None
    routes: npt.NDArray[np.integer[Any]] | None = None
    """In the last chunk only: [prompt + output - 1, L, K], see `Trajectory.routes`. Each position keeps the experts of
    the pass that first computed it, also when a preemption or new weights make its key-values be computed again."""
    cached_tokens: int = 0
    """In the last chunk only: how many prompt tokens had their key-values reused."""


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
    """Whether requests will ask for routes, for engines that must know it when they start (tag `records-routes`)."""
    true_on_policy: bool = False
    """Compute log-probs that the trainer can reproduce bit for bit (tag `true-on-policy`)."""
    log_dir: str | None = None
    """Folder for the logs of processes that the engine starts; None outside a run."""


class Engine(Protocol):
    """Created as ``Engine(options, context)``, by the executor, once for each replica.

    A weight update is ``receive`` (beside serving, with the tag `stages-aside`), ``pause``, ``activate``, ``resume``.
    New weights take effect only in `activate`: all of them at once, and only a complete version.
    """

    async def start(self) -> None:
        """Load the checkpoint and be ready to generate. The weight version is -1: nothing was published yet."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Sample a continuation of the prompt. Closing the iterator early aborts the request.

        Raises:
            EngineError: the request does not fit the context, or the engine is closed.
        """
        ...

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Stop generating, between two tokens. Requests that arrive meanwhile wait. Pausing twice is the same as once.

        Args:
            mode: What becomes of the requests in flight. All keep the tokens and log-probs they have.
                ``retract`` returns them to the queue and drops their key-values, which `resume` computes again from
                the ids. ``in-place`` (tag `pauses-in-place`) freezes them: under the new weights they go on over their
                old key-values, which no other request may use. ``abort`` ends them with `FinishReason.ABORT`.
        """
        ...

    async def resume(self) -> None:
        """Generate again. Except for requests frozen in place, no key-values of older weights may be used. Resuming
        twice is the same as once."""
        ...

    async def open_receiver(self, make: Callable[[], Receiver]) -> None:
        """Build the transport's receiving end in this process, and close the one before it, if any.

        It is closed with the engine. It is replaced when the transport connects anew because another engine joined.
        """
        ...

    async def receive(self, version: int) -> WeightManifest:
        """Take all buckets of a version from the receiver and stage them, without serving them.

        Raises:
            EngineError: a tensor is unknown, has another shape or dtype, came twice, or is missing at the end. What was
                staged is dropped, and the weights that are served are untouched.
        """
        ...

    async def activate(self, version: int) -> None:
        """Serve the staged version from the next token on, and flush every cache of the old one, except the key-values
        of requests frozen in place.

        Raises:
            EngineError: that version is not staged completely.
        """
        ...

    async def version(self) -> int:
        """The weight version that is served; -1 before the first."""
        ...

    async def scramble(self, seed: int) -> None:
        """Overwrite every weight with noise, so that it shows if the next version does not replace all of them (tag
        `verifies-weights`)."""
        ...

    async def digests(self, names: Collection[str] | None = None) -> Mapping[str, str]:
        """Digests (`weights.digests.digest_tensor`) of the tensors that the engine serves *now*, under their Hugging
        Face names (tag `verifies-weights`).

        They must be computed from the live weights, not from the copy that was received. If the engine fuses or shards
        tensors, it still answers for the parts. Either it cuts them out of the live tensor; or it compares a checksum
        of the live fused tensor with that of the parts put together, and reports the parts' digests if the two agree.

        Args:
            names: The tensors that are asked for; None is all.
        """
        ...

    async def stats(self) -> Mapping[str, float]:
        """Gauges for the display: running, waiting, tokens sampled, cached tokens."""
        ...

    async def close(self) -> None:
        """End requests in flight with an `EngineError`, and free everything."""
        ...
