"""The session server: an ASGI application for the sessions of a store.

A client names its session in the path (``/sessions/{key}/v1/...``), so that it need only set a base URL, or in a
header, so that it need only set headers or an API key.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from miles_core import __version__
from miles_core.errors import MilesError
from miles_core.session.serving import control
from miles_core.session.serving.http import Json
from miles_core.session.serving.openapi import document
from miles_core.session.serving.problems import Refused, openai_error
from miles_core.session.serving.protocol import WireProtocol
from miles_core.session.serving.running import ClientGone
from miles_core.session.serving.store import SessionStore
from miles_core.session.serving.turns import Turns, as_refused
from miles_core.session.serving.wires import MESSAGES, WIRES

_log = logging.getLogger(__name__)

SESSION_HEADER = "x-session-id"

PREFIXES = ("/sessions/{key}", "")
"""Where the protocols live: the key in the path, or in a header."""

Handler = Callable[[Request], Awaitable[Response]]


def make_app(store: SessionStore) -> Starlette:
    """Make the application. It lives as long as the store: at its end, all sessions are closed."""
    turns = Turns(store)
    routes = [*control.routes(store)]
    for wire in WIRES:
        handler = _turn_handler(store, turns, wire)
        routes += [Route(prefix + wire.path, handler, methods=["POST"]) for prefix in PREFIXES]
    counter = _count_handler(store, turns)
    routes += [Route(prefix + MESSAGES.path + "/count_tokens", counter, methods=["POST"]) for prefix in PREFIXES]
    routes.append(Route("/openapi.json", _openapi, methods=["GET"]))
    return Starlette(
        routes=[Route(each.path, _guarded(store, each.endpoint), methods=each.methods) for each in routes],
        lifespan=lambda app: _life(store),
        exception_handlers={HTTPException: _http_error},
    )


async def _openapi(request: Request) -> Response:
    return Json(document(__version__))


def session_key(request: Request) -> str:
    """The session a request names.

    Raises:
        Refused: it names none.
    """
    if "key" in request.path_params:
        return str(request.path_params["key"])
    for value in (request.headers.get(SESSION_HEADER), request.headers.get("x-api-key")):
        if value:
            return value.strip()
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    raise Refused(
        400,
        "the request names no session: use /sessions/{key}/v1/..., the header X-Session-Id, or the key as API key",
        param=SESSION_HEADER,
    )


def _turn_handler(store: SessionStore, turns: Turns, wire: WireProtocol) -> Handler:
    async def handler(request: Request) -> Response:
        try:
            return await turns.serve(request, session_key(request), wire)
        except (Refused, MilesError) as error:
            return _problem(store, as_refused(error), wire)

    return handler


def _count_handler(store: SessionStore, turns: Turns) -> Handler:
    async def handler(request: Request) -> Response:
        try:
            return Json({"input_tokens": await turns.count_tokens(request, session_key(request), MESSAGES)})
        except (Refused, MilesError) as error:
            return _problem(store, as_refused(error), MESSAGES)

    return handler


def _problem(store: SessionStore, problem: Refused, wire: WireProtocol | None = None) -> Response:
    name = "control" if wire is None else wire.name
    store.metrics.add("miles_requests_total", protocol=name, status=str(problem.status))
    body = openai_error(problem) if wire is None else wire.error(problem)
    # The client may be in the middle of a long body; telling it to hang up is kinder than reading it all.
    headers = {"connection": "close"} if problem.status == 413 else None
    return Json(body, problem.status, headers)


def _guarded(store: SessionStore, endpoint: Any) -> Handler:
    async def guarded(request: Request) -> Response:
        try:
            found: Response = await endpoint(request)
            return found
        except ClientGone:
            return PlainTextResponse("", 499)  # nobody reads it
        except Exception as error:  # noqa: BLE001 - the request boundary: one request must not take the server down
            return _problem(store, as_refused(error))

    return guarded


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return Json(openai_error(Refused(error.status_code, error.detail)), error.status_code, error.headers)


@contextlib.asynccontextmanager
async def _life(store: SessionStore) -> AsyncIterator[None]:
    sweeping = asyncio.create_task(_sweep(store))
    try:
        yield
    finally:
        sweeping.cancel()
        store.close_all()
        await asyncio.gather(sweeping, return_exceptions=True)


async def _sweep(store: SessionStore) -> None:
    while True:
        await asyncio.sleep(min(store.settings.idle_timeout_s / 4, 5.0))
        try:
            store.sweep()
            store.limit()
        except OSError:
            # A journal whose disk fails for a moment must not end the watch over time and memory for good.
            _log.exception("sessions could not be closed; trying again")
