"""Environment `chat`: asks for one answer to each prompt, and lets the rewards score it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from miles_core.kinds.environment import EpisodeResult, SessionHandle
from miles_core.types import Prompt


class ChatEnvironment:
    """An environment of a single turn, with neither prompts nor a score of its own."""

    def __init__(self, options: Any = None) -> None:
        del options  # takes none

    def prompts(self, split: Literal["train", "eval"]) -> Sequence[Prompt] | None:
        return None

    async def run(self, prompt: Prompt, session: SessionHandle) -> EpisodeResult:
        await session.complete(prompt.messages, prompt.tools)
        return EpisodeResult()

    async def close(self) -> None:
        return None
