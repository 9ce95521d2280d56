"""Lets a session server listen, inside the event loop that is running."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn

from miles_core.errors import RunError
from miles_core.session.serving.app import make_app
from miles_core.session.serving.store import SessionStore

GRACE_S = 5
"""What answers under way get at shutdown."""
KEEP_ALIVE_S = 75
"""For idle connections. Longer than clients keep theirs (5 s in httpx and the SDKs over it): the side that closes first
may do so under a request of the other, which an agent sees as a broken connection."""


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: signals are handled by the owner of the event loop."""
        yield


@contextlib.asynccontextmanager
async def listening(store: SessionStore, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve `store` until the block ends. Yields the base URL. Port 0 takes a free port.

    Raises:
        RunError: the address cannot be taken.
    """
    listener = _listener(host, port)
    config = uvicorn.Config(
        make_app(store),
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=KEEP_ALIVE_S,
        lifespan="on",
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve([listener]))
    try:
        while not server.started:
            if serving.done():
                serving.result()
                raise RunError("the session server ended before it began")
            await asyncio.sleep(0.005)
        name, taken = listener.getsockname()[:2]
        yield f"http://[{name}]:{taken}" if ":" in name else f"http://{name}:{taken}"
    finally:
        server.should_exit = True
        # Streams under way end with their sessions; waiting for them would wait for their agents.
        store.close_all()
        await serving
        listener.close()


def _listener(host: str, port: int) -> socket.socket:
    try:
        # asyncio switches Nagle's algorithm off only where a socket names its protocol; with it on, every answer waits
        # 40 ms for the client's delayed acknowledgement.
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except OSError:
            listener.close()
            raise
        return listener
    except OSError as error:
        raise RunError(
            f"the session server cannot listen: {error}",
            where=f"{host}:{port}",
            do="choose another port (0 takes a free one) or an address of this machine",
        ) from error
