"""A tokenizer, and an engine that answers from a script and remembers what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from miles_core.kinds.engine import Chunk, GenerateRequest
from miles_core.session.default_family import DefaultFamily
from miles_core.session.factory import SessionFactory
from miles_core.session.linear import LinearSession
from miles_core.session.matching import strict
from miles_core.testing.tiny import IM_END, write_tiny_tokenizer
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import FinishReason, SamplingParams


@dataclass
class ScriptEngine:
    """Each request takes the next reply: a list of chunks, text (sampled canonically and stopped), or an exception."""

    tokenizer: ChatTokenizer
    replies: list[Any] = field(default_factory=list)
    requests: list[GenerateRequest] = field(default_factory=list)
    gate: asyncio.Event | None = None
    """When set, generation waits for it after its first token."""
    closed_early: int = 0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self.requests.append(request)
        reply = self.replies.pop(0) if self.replies else "ok"
        if isinstance(reply, BaseException):
            raise reply
        chunks = self.chunks(reply) if isinstance(reply, str) else reply
        try:
            for position, chunk in enumerate(chunks):
                yield chunk
                if self.gate is not None and position == 0:
                    await self.gate.wait()
        except (asyncio.CancelledError, GeneratorExit):
            self.closed_early += 1
            raise

    def chunks(self, text: str, *, stop: int = IM_END, version: int = 0) -> list[Chunk]:
        ids = [*self.tokenizer.encode(text), stop]
        last = len(ids) - 1
        return [
            Chunk(
                token_ids=(token,),
                logprobs=(-0.25 * (at + 1),),
                weight_version=version,
                finish_reason=FinishReason.STOP if at == last else None,
            )
            for at, token in enumerate(ids)
        ]


def chunk(
    ids: Sequence[int],
    *,
    logprobs: Sequence[float] | None = None,
    version: int = 0,
    finish: FinishReason | None = FinishReason.STOP,
    routes: Any = None,
) -> Chunk:
    values = tuple(-0.5 for _ in ids) if logprobs is None else tuple(logprobs)
    return Chunk(token_ids=tuple(ids), logprobs=values, weight_version=version, finish_reason=finish, routes=routes)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    path: Path = tmp_path_factory.mktemp("tiny")
    write_tiny_tokenizer(path)
    return ChatTokenizer.from_dir(path)


@pytest.fixture
def engine(tokenizer: ChatTokenizer) -> ScriptEngine:
    return ScriptEngine(tokenizer)


@pytest.fixture(scope="session")
def make_chunk() -> Callable[..., Chunk]:
    return chunk


@pytest.fixture(scope="session")
def new_engine() -> Callable[[ChatTokenizer], ScriptEngine]:
    return ScriptEngine


@pytest.fixture
def open_session(tokenizer: ChatTokenizer, engine: ScriptEngine) -> Callable[..., LinearSession]:
    def make(
        *,
        family: Any = None,
        matcher: Any = strict,
        context_length: int = 1000,
        routes: bool = False,
        **params: Any,
    ) -> LinearSession:
        family = DefaultFamily(None, tokenizer) if family is None else family
        factory = SessionFactory([engine], family, matcher, context_length=context_length, routes=routes)  # type: ignore[list-item]
        return factory.open("s", SamplingParams(**params))

    return make
