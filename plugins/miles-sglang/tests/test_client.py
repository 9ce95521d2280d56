"""The HTTP client against loopback servers that behave as SGLang's does where it matters."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest
from aiohttp import web

from miles_sglang.client import KEEP_S, Client


@pytest.fixture
def closing() -> Iterator[str]:
    """A server in a thread of its own that closes a connection soon after this client stops trusting it."""
    address: list[str] = []
    ready, done = threading.Event(), threading.Event()

    async def serve() -> None:
        app = web.Application()
        app.add_routes([web.post("/ask", _answer)])
        runner = web.AppRunner(app, keepalive_timeout=KEEP_S + 0.5)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        ready.set()
        await asyncio.to_thread(done.wait, 60)
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(60)
    yield address[0]
    done.set()
    thread.join(60)


async def _answer(_: web.Request) -> web.Response:
    return web.json_response({"ok": True})


async def test_a_connection_the_server_has_closed_is_not_taken_for_a_dead_server(closing: str) -> None:
    client = Client(closing, "test")
    async with asyncio.timeout(60):
        assert await client.post("/ask", {}) == {"ok": True}
        # This loop is busy while the server closes, so nobody has told it when it asks again.
        time.sleep(KEEP_S + 2)  # noqa: ASYNC251
        assert await client.post("/ask", {}) == {"ok": True}
    await client.close()
