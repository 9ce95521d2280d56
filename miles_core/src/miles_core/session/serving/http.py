"""HTTP bodies: JSON requests of limited size, JSON answers, and event streams that notice when their reader leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pydantic_core
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from miles_core.session.serving.problems import Refused
from miles_core.session.serving.running import ClientGone, while_connected


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return pydantic_core.to_json(content)


async def read_object(request: Request, limit: int) -> dict[str, Any]:
    """Read the JSON object in the body of a request; an empty body is an empty object.

    Raises:
        Refused: 413 beyond `limit` bytes, 400 for anything else than an object.
    """
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > limit:
            raise Refused(413, f"the body is longer than {limit} bytes")
    if not size:
        return {}
    body = b"".join(parts)
    try:
        found = pydantic_core.from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise Refused(400, f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise Refused(400, f"expected a JSON object, found {type(found).__name__}")
    return found


class EventStream(Response):
    """Server-sent events from `source`, which is closed when they end or the client goes away.

    Args:
        abandon: Called when the client leaves, perhaps before anything was read from `source`.
        on_gone: Called then as well, to count it.
        on_close: Called in any case, at the end.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        source: AsyncGenerator[bytes, None],
        abandon: Callable[[], object],
        *,
        on_gone: Callable[[], object],
        on_close: Callable[[], object],
    ) -> None:
        self.status_code, self.background = 200, None
        self._source, self._abandon, self._on_gone, self._on_close = source, abandon, on_gone, on_close
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(send))
        except (ClientGone, OSError):
            self._on_gone()
        finally:
            self._abandon()
            self._on_close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with contextlib.aclosing(self._source) as source:
            async for part in source:
                await send({"type": "http.response.body", "body": part, "more_body": True})
                # Uvicorn's buffer takes many small events at once; a reader should see each when it is made.
                await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def event(data: Any, name: str | None = None) -> bytes:
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + pydantic_core.to_json(data) + b"\n\n"


DONE = b"data: [DONE]\n\n"
