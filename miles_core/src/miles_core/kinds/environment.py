"""Environment: runs an episode, asking a session for the model's turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from miles_core.types import FinishReason, Message, Prompt, Tool


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One assistant turn, as an environment sees it. Its tokens stay with the session."""

    message: Message
    finish_reason: FinishReason
    num_tokens: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose key-values the engine reused."""
    turn: int = -1
    """Number of the turn in its session, from 0."""


class SessionHandle(Protocol):
    """What an environment can do with its session: ask for the next assistant message. It never sees token ids."""

    async def complete(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Completion:
        """Sample the next assistant message.

        Args:
            messages: The whole history so far. It must begin with what the session already holds.
            tools: Tools the model may call.

        Raises:
            SessionError: the history differs from the stored one, or the context is full.
            EngineError: the engine failed.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeResult:
    """What an episode reports. Its tokens are not among it: the session has recorded them."""

    reward: float | None = None
    """The environment's own score, which is added to the run's rewards; None if it has none."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """JSON-compatible; goes into `Trajectory.metadata`, where rewards can read it."""


class Environment(Protocol):
    """Created once in the driver as ``Environment(options)``. `run` is called for each trajectory; many run at once."""

    def prompts(self, split: Literal["train", "eval"]) -> Sequence[Prompt] | None:
        """The environment's own prompts (tag `provides-prompts`), or None. The same index must always give the same
        prompt, without much work."""
        ...

    async def run(self, prompt: Prompt, session: SessionHandle) -> EpisodeResult:
        """Run one episode. If it raises, the trajectory counts as failed; if it is cancelled, it must leave nothing
        behind."""
        ...

    async def close(self) -> None: ...
