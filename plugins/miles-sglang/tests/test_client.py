"""The HTTP client against loopback servers that behave as SGLang's does where it matters."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from miles_core.errors import EngineError
from miles_sglang.client import KEEP_S, Client, EventReader, ServerGone, without_password


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


EVENT = b'data: {"output_ids": [], "meta_info": {}}\n\n'


@pytest.mark.parametrize(
    ("written", "error", "named"),
    [
        (EVENT, ServerGone, "ended early"),
        (EVENT + EVENT[:20], ServerGone, "ended early"),
        (b"", ServerGone, "ended early"),
        (b"data: {broken\n\n", EngineError, "cannot be read"),
        (b"data: [1]\n\n", EngineError, "cannot be read"),
        (b'data: {"error": {"message": "out of memory"}}\n\n', EngineError, "out of memory"),
    ],
)
async def test_a_stream_that_is_cut_or_is_none_is_told(written: bytes, error: type[Exception], named: str) -> None:
    async with asyncio.timeout(60), answering(written) as client:
        with pytest.raises(error, match=named) as caught:
            async for _ in client.stream({}):
                pass
    assert isinstance(caught.value, ServerGone) is (error is ServerGone)


async def test_a_stream_read_to_its_end_gives_its_connection_back() -> None:
    async with asyncio.timeout(60), answering(EVENT + b"data: [DONE]\n\n") as client:
        for _ in range(5):
            assert [event async for event in client.stream({})] == [{"output_ids": [], "meta_info": {}}]
        assert client._session is not None
        connector = client._session.connector
        assert connector is not None
        assert len(connector._conns) == 1
        assert sum(len(idle) for idle in connector._conns.values()) == 1, "five streams took more than one connection"


def test_events_may_be_cut_anywhere() -> None:
    whole = EVENT * 2 + b"data: [DONE]\n\n"
    for at in range(len(whole)):
        reader = EventReader("here")
        found = [*reader.feed(whole[:at]), *reader.feed(whole[at:])]
        assert found == [{"output_ids": [], "meta_info": {}}] * 2 + [None]


def test_a_password_in_an_address_is_not_told() -> None:
    assert without_password("http://user:secret@host:30000") == "http://host:30000"
    assert without_password("http://host:30000") == "http://host:30000"


@asynccontextmanager
async def answering(written: bytes) -> AsyncIterator[Client]:
    """A client of a server that streams these bytes to everybody."""

    async def generate(_: web.Request) -> web.Response:
        return web.Response(body=written, content_type="text/event-stream")

    app = web.Application()
    app.add_routes([web.post("/generate", generate)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = Client(f"http://127.0.0.1:{runner.addresses[0][1]}", "test")
    try:
        yield client
    finally:
        await client.close()
        await runner.cleanup()


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("127.0.0.1:9", r"no address(?s:.*)http://host:port"),
        ("http://127.0.0.1:9", r"no server answers(?s:.*)Connect call failed"),
    ],
)
async def test_an_address_where_nothing_can_answer_is_told(url: str, error: str) -> None:
    client = Client(url, "test")
    with pytest.raises(ServerGone, match=error):
        await client.get("/server_info")
    await client.close()
