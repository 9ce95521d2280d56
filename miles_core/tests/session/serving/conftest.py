"""A session server on loopback over the scripted engine, and the official clients against it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from miles_core.session.default_family import DefaultFamily
from miles_core.session.factory import SessionFactory
from miles_core.session.matching import strict
from miles_core.session.serving.runner import listening
from miles_core.session.serving.settings import ServerSettings
from miles_core.session.serving.store import SessionStore
from miles_core.testing.waiting import until
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import SamplingParams


@dataclass
class Served:
    url: str
    store: SessionStore
    http: httpx.AsyncClient

    async def create(self, **sampling: Any) -> str:
        found = await self.http.post("/sessions", json={"sampling": sampling})
        assert found.status_code == 201, found.text
        return str(found.json()["session_id"])

    async def chat(self, key: str, messages: list[dict[str, Any]], **fields: Any) -> httpx.Response:
        return await self.http.post(
            f"/sessions/{key}/v1/chat/completions", json={"model": "m", "messages": messages, **fields}
        )

    async def idle(self, key: str) -> None:
        """Wait until no request uses the session."""
        entry = self.store.get(key)
        await until(lambda: not entry.running and not entry.users, "that nobody uses the session")

    async def samples(self, key: str, **fields: Any) -> list[dict[str, Any]]:
        found = await self.http.post(f"/sessions/{key}/samples", json=fields)
        assert found.status_code == 200, found.text
        return list(found.json()["samples"])


Serve = Callable[..., contextlib.AbstractAsyncContextManager[Served]]


@pytest.fixture
def serve(tokenizer: ChatTokenizer, engine: Any) -> Serve:
    @contextlib.asynccontextmanager
    async def run(
        *,
        matcher: Any = strict,
        history: Any = "linear",
        context_length: int = 4000,
        journal: Any = None,
        family: Any = None,
        clock: Any = None,
        engines: Any = None,
        **settings: Any,
    ) -> AsyncIterator[Served]:
        factory = SessionFactory(
            engines or [engine],
            family or DefaultFamily(None, tokenizer),
            matcher,
            context_length=context_length,
            history=history,
        )
        settings.setdefault("sampling", SamplingParams(max_tokens=500))
        clocks = {} if clock is None else {"clock": clock}
        store = SessionStore(factory, ServerSettings(**settings), journal=journal, **clocks)
        async with listening(store) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
            yield Served(url, store, http)

    return run
