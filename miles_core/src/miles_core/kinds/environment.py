"""Environment: runs one episode against a session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from miles_core.types import FinishReason, Message, Prompt, Tool


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One assistant turn, as the agent sees it. The tokens stay with the session."""

    message: Message
    finish_reason: FinishReason
    num_tokens: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV the engine reused."""
    turn: int = -1
    """Number of the turn in its session."""


class SessionHandle(Protocol):
    """What an environment may do with its session: ask for the next assistant message. It never sees token ids."""

    async def complete(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Completion:
        """Sample the next assistant message.

        Args:
            messages: The full history so far; must extend what the session already holds.
            tools: Tools the model may call.

        Raises:
            SessionError: the history diverges from the stored one, or the context is full.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeResult:
    """What an episode reports besides the tokens its session recorded."""

    reward: float | None = None
    """The environment's own score, added to the run's rewards; None when it has none."""
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """Created once in the driver as ``Environment(options)``; `run` is called concurrently, once per trajectory."""

    def prompts(self, split: Literal["train", "eval"]) -> Sequence[Prompt] | None:
        """The environment's own prompts (tag `provides-prompts`), or None. Indexing is deterministic and cheap."""
        ...

    async def run(self, prompt: Prompt, session: SessionHandle) -> EpisodeResult:
        """Run one episode. An exception makes the trajectory failed(environment); cancellation must leave nothing
        behind."""
        ...

    async def close(self) -> None: ...
