"""The values that flow through a run, in this order; all are plain, immutable and numpy only.

    Prompt -> (session) -> Trajectory -> Group -> TrainBatch -> (loss, optimizer step) -> WeightBucket

Letters in shapes: T is the number of tokens of one trajectory, N that of a whole batch (sequences packed one after
another), S the number of sequences of a batch, L the number of MoE layers, K the number of experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from miles_core.errors import ContractError

if TYPE_CHECKING:
    import torch

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]

RouteMode = Literal["off", "record", "replay"]
"""What a run does with the experts that the engine's MoE layers chose. `off`: nothing. `record`: return them with the
tokens and count where the trainer would have chosen others. `replay`: also make the trainer use them (R3)."""

UNRECORDED = -1
"""Stands in all L x K routes of a position for which the engine recorded none. The trainer chooses for itself there."""


# --- conversation ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call of the model. `arguments` is the JSON text, character for character as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message. It is made from tokens; tokens that were sampled are never made from it.

    Example:
        Message(role="user", content="2 + 2 = ?")
    """

    role: str
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


Tool = Mapping[str, Any]
"""A function tool in the OpenAI shape: ``{"type": "function", "function": {"name", "description", "parameters"}}``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One task drawn from the data."""

    id: str
    """Stable across epochs and runs; unique within its source."""
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """JSON-compatible; reaches environment, reward and tracker unchanged."""


# --- sampling -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How an engine samples. Neutral by default: a checkpoint's generation_config never alters it.

    Log-probs are always those of the temperature-scaled, full-vocabulary policy: top-p, top-k and min-p restrict
    what is sampled but never renormalise. Temperature 0 samples the argmax and its log-prob is that of temperature 1.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 means off."""
    min_p: float = 0.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    """Stop strings. The tokens that spell one stay in the row, since they were sampled."""
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    """With a seed, the tokens of a request depend on weights, prompt and seed alone, whatever else the engine does."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """Tokens ``[start, end)`` of a row, all sampled with one weight version; never empty."""

    start: int
    end: int
    weight_version: int


# --- trajectories ---------------------------------------------------------------------------------------------------


class Status(StrEnum):
    """How a trajectory ended. A failed one is counted and kept out of loss and baseline; it is never scored 0."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


class Boundary(StrEnum):
    """Which part of the system a failed trajectory failed in."""

    ENGINE = "engine"
    HARNESS = "harness"
    ENVIRONMENT = "environment"
    REWARD = "reward"
    MATCHER = "matcher"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    boundary: Boundary
    message: str
    timed_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One attempt at a prompt: the row of tokens that its session owns, and what is known of each token.

    All arrays over tokens have length T. `logprobs` is NaN where the token was not sampled, since 0.0 is a legal
    log-prob. `loss_mask` says which of the `sampled` tokens are trained: where a session branched, several rows hold
    the same sampled tokens, and only one of these rows trains them.
    """

    prompt_id: str
    session_id: str
    token_ids: Int32
    sampled: Bool
    loss_mask: Bool
    logprobs: Float32
    spans: tuple[TokenSpan, ...]
    temperature: float
    """Temperature the tokens were sampled at; the trainer divides logits by it. 0 stands for greedy sampling, whose
    log-probs are those of temperature 1 (see `SamplingParams`)."""
    status: Status
    failure: Failure | None = None
    reward: float | None = None
    routes: npt.NDArray[np.integer[Any]] | None = None
    """int16 or int32 [T-1, L, K]: the experts to which each MoE layer, in order of depth, sent the token at each
    position, in the router's own order. The last token has none: it was never an input. `UNRECORDED` fills positions
    without a record, such as those after an aborted turn. None if the engine records nothing. See `routing.codec`."""
    messages: tuple[Message, ...] = ()
    """The whole conversation, prompt included."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """JSON-compatible facts from environment and reward (reward parts, turns, tool time)."""
    branches: tuple[Trajectory, ...] = ()
    """Further rows of the same attempt, if its session branched. All rows together are one attempt with one reward."""

    @property
    def rows(self) -> tuple[Trajectory, ...]:
        """This row, and those of its branches that train at least one token."""
        return (self, *(row for row in self.branches if row.loss_mask.any()))

    @property
    def length(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def response_tokens(self) -> int:
        """Number of sampled tokens."""
        return int(self.sampled.sum())

    def check(self) -> None:
        """Verify the tokens contract.

        Raises:
            ContractError: naming the first array or position that breaks it.
        """
        problem = _row_problem(self)
        if problem:
            raise ContractError(
                "tokens contract: " + problem,
                where=f"prompt {self.prompt_id!r}, session {self.session_id!r}",
                do="report the engine or session that built this trajectory",
            )

    def with_reward(self, reward: float | None, **metadata: Any) -> Trajectory:
        return replace(self, reward=reward, metadata={**self.metadata, **metadata})


def _row_problem(row: Trajectory) -> str | None:
    length = row.length
    for name in ("sampled", "loss_mask", "logprobs"):
        found = getattr(row, name).shape
        if found != (length,):
            return f"`{name}` has shape {found}, `token_ids` has ({length},)"
    if (row.loss_mask & ~row.sampled).any():
        return f"token {int(np.argmax(row.loss_mask & ~row.sampled))} is trained but was not sampled"
    finite = np.isfinite(row.logprobs)
    if (finite != row.sampled).any():
        at = int(np.argmax(finite != row.sampled))
        return f"token {at} has log-prob {row.logprobs[at]} and sampled={bool(row.sampled[at])}"
    if (row.logprobs[row.sampled] > 0).any():
        return "a sampled token has a positive log-prob"
    covered = np.zeros(length, dtype=np.int64)
    for span in row.spans:
        if not 0 <= span.start < span.end <= length:
            return f"span [{span.start}, {span.end}) does not lie in [0, {length})"
        covered[span.start : span.end] += 1
    if (covered != row.sampled).any():
        return f"version spans do not tile the sampled tokens (first at {int(np.argmax(covered != row.sampled))})"
    if row.routes is not None and row.routes.shape[0] != max(length - 1, 0):
        return f"`routes` has {row.routes.shape[0]} rows for {length} tokens, expected {length - 1}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All attempts at one prompt; group-relative advantages compare them with one another."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]

    @property
    def trainable(self) -> tuple[Trajectory, ...]:
        """The trajectories to learn from: ended by themselves or by length, scored, and with a token to train. Failures
        and aborts say something about the infrastructure, not about the policy."""
        good = (Status.COMPLETED, Status.TRUNCATED)
        return tuple(t for t in self.trajectories if t.status in good and t.reward is not None and t.loss_mask.any())


# --- training -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Whole trajectories, one after another.

    The loss of an update is ``sum(token_weights * per_token_loss)`` over all micro-batches of all ranks. Every
    denominator is in `token_weights` already, so that no later stage divides by anything.
    """

    lengths: Int64
    """[S] tokens of each sequence; sum = N."""
    group_ids: Int64
    """[S] which prompt a sequence belongs to."""
    rewards: Float32
    """[S]"""
    temperatures: Float32
    """[S] as sampled; 0 is stored as 1."""
    token_ids: Int32
    """[N]"""
    loss_mask: Bool
    """[N] True where the token is trained. In all log-prob arrays, position i holds the log-prob of token i given the
    tokens before it in its sequence."""
    rollout_logprobs: Float32
    """[N] the engine's log-prob; 0.0 where the token was not sampled (NaN in `Trajectory.logprobs`)."""
    versions: Int64
    """[N] weight version that sampled the token, -1 where not sampled."""
    advantages: Float32
    """[N]"""
    token_weights: Float32
    """[N] weight of the token's loss in the whole update; 0 where the token is not trained."""
    correction_weights: Float32
    """[N] product of the weights that the corrections give; 1 without any."""
    old_logprobs: Float32 | None = None
    """[N] the old policy's log-probs: the trainer's before the update, or the engine's if the run-file says so."""
    ref_logprobs: Float32 | None = None
    """[N] the reference policy's log-probs, if the run uses a KL to it."""
    values: Float32 | None = None
    """[N] a critic's values."""
    attempt_ids: Int64 | None = None
    """[S] the attempt a sequence belongs to: rows of a session that branched share one. None if all differ."""
    routes: npt.NDArray[np.integer[Any]] | None = None
    """[N, L, K] int16 or int32, as in `Trajectory.routes`: the experts that token i was sent to, on which the log-prob
    of token i + 1 depends. A sequence's last position is `UNRECORDED`: no log-prob depends on it. What a backend does
    with them, in every forward pass of the policy, depends on `BackendContext.routes`; the reference policy always
    chooses for itself."""

    @property
    def num_sequences(self) -> int:
        return int(self.lengths.shape[0])

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_loss_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def offsets(self) -> Int64:
        """[S + 1] where each sequence starts in the packed arrays; N at the end."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)

    @property
    def sequence_ids(self) -> Int64:
        """[N] the sequence of each token."""
        return np.repeat(np.arange(self.num_sequences, dtype=np.int64), self.lengths)

    @property
    def token_attempts(self) -> Int64:
        """[N] the attempt of each token. Advantages and reductions go by attempts: a branched one counts once."""
        return self.sequence_ids if self.attempt_ids is None else np.repeat(self.attempt_ids, self.lengths)

    def select(self, sequences: Sequence[int]) -> TrainBatch:
        """A batch of the given sequences, in that order. Token weights stay what they were in the whole update."""
        picked = np.asarray(sequences, dtype=np.int64)
        starts = self.offsets[:-1]
        tokens = np.concatenate(
            [np.arange(starts[s], starts[s] + self.lengths[s]) for s in picked] or [np.zeros(0, np.int64)]
        )
        changes: dict[str, Any] = {}
        for names, index in ((PER_SEQUENCE, picked), (PER_TOKEN, tokens)):
            changes |= {name: values[index] for name in names if (values := getattr(self, name)) is not None}
        return replace(self, **changes)


PER_SEQUENCE = ("lengths", "group_ids", "rewards", "temperatures", "attempt_ids")
PER_TOKEN = (
    "token_ids",
    "loss_mask",
    "rollout_logprobs",
    "versions",
    "advantages",
    "token_weights",
    "correction_weights",
    "old_logprobs",
    "ref_logprobs",
    "values",
    "routes",
)


# --- weights --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """A tensor under its Hugging Face name."""

    name: str
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBucket:
    """A piece of one weight version, of bounded size. Tensors that engines fuse into one are never split over two."""

    version: int
    index: int
    last: bool
    tensors: tuple[NamedTensor, ...]

    def owner(self, world_size: int) -> int:
        """The one rank that answers for the bucket where each moves its own share: all in turn."""
        return self.index % world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """One side's account of a weight version: the digest (`weights.digests`) of every tensor it sent or received."""

    version: int
    digests: Mapping[str, str]
    num_bytes: int
    figures: Mapping[str, float] = field(default_factory=dict, compare=False)
    """What it cost that side, under the names of `tracking.names` without ``sync/``: ``prepare_s``, ``wire_bytes``."""
