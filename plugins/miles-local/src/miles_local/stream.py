"""One request's way out of the engine: sampled tokens, its end, or the error that ended it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from miles_core.errors import EngineError
from miles_core.kinds.engine import Chunk
from miles_core.routing.codec import Routes
from miles_core.types import FinishReason


@dataclass(frozen=True, slots=True)
class Token:
    token_id: int
    logprob: float
    weight_version: int


class Stream:
    """Written by the engine's loop, read by one consumer of the same event loop."""

    def __init__(self) -> None:
        self._tokens: list[Token] = []
        self._finish: FinishReason | None = None
        self._error: EngineError | None = None
        self._cached = 0
        self._routes: Routes | None = None
        self._version = -1
        self._ready = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self._finish is not None or self._error is not None

    def put(self, token: Token) -> None:
        self._tokens.append(token)
        self._ready.set()

    def finish(self, reason: FinishReason, cached_tokens: int, routes: Routes | None = None) -> None:
        self._finish, self._cached, self._routes = reason, cached_tokens, routes
        self._ready.set()

    def fail(self, error: EngineError) -> None:
        self._error = error
        self._ready.set()

    async def take(self) -> Chunk:
        """Wait for the next tokens; all that are there come at once, up to a change of weight version.

        Raises:
            EngineError: the request failed.
        """
        await self._ready.wait()
        if self._error is not None:
            raise self._error
        version = self._version = self._tokens[0].weight_version if self._tokens else self._version
        count = next((i for i, t in enumerate(self._tokens) if t.weight_version != version), len(self._tokens))
        taken, self._tokens = self._tokens[:count], self._tokens[count:]
        last = not self._tokens and self._finish is not None
        if not self._tokens and not last:
            self._ready.clear()
        return Chunk(
            token_ids=tuple(token.token_id for token in taken),
            logprobs=tuple(token.logprob for token in taken),
            weight_version=version,
            finish_reason=self._finish if last else None,
            routes=self._routes if last else None,
            cached_tokens=self._cached if last else 0,
        )
