"""HTTP to one SGLang server: one pooled client, JSON both ways, failures as errors with the server's own words."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import aiohttp
import orjson

from miles_core.errors import EngineError

Json = Mapping[str, Any]

JSON = {"Content-Type": "application/json"}

KEEP_S = 2.0
"""How long an idle connection is used again. SGLang closes one after 5 s, and a request sent into it as it closes would
look like a server that died."""
MAX_EVENT_BYTES = 2**28
"""One line of a stream; routes of a long row are tens of MiB in one."""


class ServerGone(EngineError):
    """The connection failed: the server died, or was never there."""


class Client:
    """Talks to the server at `url`.

    Args:
        url: Such as ``http://127.0.0.1:30000``.
        where: The engine's name, for errors.
        patience_s: How long an answer may take where nothing else is said; None waits for ever. Streams
            take their time.
    """

    def __init__(self, url: str, where: str, patience_s: float | None = None) -> None:
        self.url = url.rstrip("/")
        self._where = f"{where} at {without_password(self.url)}"
        self._patience_s = patience_s
        self._session: aiohttp.ClientSession | None = None

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            # No limit: the engine may have thousands of requests in flight, and the server queues them.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
                read_bufsize=2**20,
            )
        return self._session

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        return await self._ask("GET", path, None, timeout_s)

    async def post(self, path: str, body: Json, *, timeout_s: float | None = None) -> Any:
        """Send a JSON object.

        Returns:
            The decoded answer; the text itself where it is no JSON.

        Raises:
            ServerGone: the connection broke before an answer.
            EngineError: the server refused, with its message, or did not answer in time.
        """
        return await self._ask("POST", path, body, timeout_s)

    async def stream(self, body: Json) -> AsyncGenerator[dict[str, Any]]:
        """POST /generate and yield its events, each as decoded. Read to its end it gives its connection back.

        Raises:
            ServerGone: the connection broke before the end.
            EngineError: the server refused the request, failed while it ran, or wrote what is no event.
        """
        events, ended = EventReader(self._where), False
        try:
            async with self._http().post(f"{self.url}/generate", data=encode(body), headers=JSON) as response:
                if response.status != 200:
                    raise self._refused("POST", "/generate", response.status, await response.text())
                async for piece in response.content.iter_any():
                    for event in events.feed(piece):
                        if event is None:
                            ended = True
                        elif "error" in event:
                            raise self._refused("POST", "/generate", response.status, json.dumps(event["error"]))
                        else:
                            yield event
        except (aiohttp.ClientError, OSError) as error:
            if not ended:
                raise self._gone("/generate", error) from error
        if not ended:
            raise self._gone("/generate", None)

    async def _ask(self, method: str, path: str, body: Json | None, timeout_s: float | None) -> Any:
        timeout_s = self._patience_s if timeout_s is None else timeout_s
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=30)
        data = None if body is None else encode(body)
        try:
            async with self._http().request(
                method, self.url + path, data=data, headers=JSON, timeout=timeout
            ) as response:
                text = await response.text()
                if response.status != 200:
                    raise self._refused(method, path, response.status, text)
        except TimeoutError as error:
            raise EngineError(
                f"{method} {path} was not answered", expected=f"an answer in {timeout_s} s", where=self._where
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._gone(path, error) from error
        try:
            return json.loads(text)
        except ValueError:
            return text

    def _refused(self, method: str, path: str, status: int, text: str) -> EngineError:
        return EngineError(
            f"the server refused {method} {path}",
            expected="200",
            found=f"{status}: {_message(text)}",
            where=self._where,
        )

    def _gone(self, path: str, error: Exception | None) -> ServerGone:
        if isinstance(error, aiohttp.NonHttpUrlClientError | aiohttp.InvalidURL):
            message, found, do = "this is no address of a server", self._where, "write it as http://host:port"
        elif isinstance(error, aiohttp.ClientConnectorError):
            message, found = f"no server answers ({path})", str(error.os_error)
            do = "look whether it runs, and listens at this address"
        else:
            message, do = f"the server is gone ({path})", None
            found = "the connection ended early" if error is None else f"{type(error).__name__}: {error}"
        return ServerGone(message, found=found, where=self._where, do=do)


class EventReader:
    """Server-sent events from the bytes of a stream: one JSON object after each ``data:``, None for ``[DONE]``."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._parts: list[bytes] = []  # of the line that has not ended; joined once: routes make lines of tens of MiB
        self._size = 0

    def feed(self, piece: bytes) -> list[dict[str, Any] | None]:
        """Events that this piece completes.

        Raises:
            EngineError: a line is no event, or too long.
        """
        *lines, rest = piece.split(b"\n")
        if lines:
            lines[0] = b"".join([*self._parts, lines[0]])
            self._parts, self._size = [], 0
        self._parts.append(rest)
        self._size += len(rest)
        if self._size > MAX_EVENT_BYTES:
            raise EngineError("an event of the stream is too long", found=f"{self._size} bytes", where=self._where)
        return [self._decode(line[6:]) for line in lines if line.startswith(b"data: ")]

    def _decode(self, text: bytes) -> dict[str, Any] | None:
        if text.rstrip() == b"[DONE]":
            return None
        try:
            event = orjson.loads(text)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise EngineError(
                "the server's stream cannot be read",
                expected="JSON objects, as SGLang writes them",
                found=repr(text[:200]),
                where=self._where,
                do="look for a proxy in between, or another program at this address",
            )
        return event


def without_password(url: str) -> str:
    """The address as errors and logs may tell it."""
    scheme, _, rest = url.rpartition("//")
    return f"{scheme}//{rest.rpartition('@')[2]}" if scheme else rest.rpartition("@")[2]


def encode(body: Json) -> bytes:
    """A request's JSON; several times as fast as the standard library's on thousands of token ids."""
    return orjson.dumps(body)


def _message(text: str) -> str:
    """The message inside an error body, whichever of the server's forms it has."""
    try:
        body = json.loads(text)
    except ValueError:
        return text[:500]
    for key in ("message", "error", "detail", "error_message"):
        found = body.get(key) if isinstance(body, dict) else None
        if isinstance(found, dict):
            found = found.get("message", found)
        if found:
            return str(found)[:2000]
    return text[:500]
