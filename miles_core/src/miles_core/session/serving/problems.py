"""What a client gets when a request fails: a status, a sentence, and the field that is at fault."""

from __future__ import annotations

from typing import Any

from miles_core.errors import ContractError, DataError, EngineError, MilesError, PluginError, SessionError
from miles_core.session.matching import MatcherError
from miles_core.session.refusals import (
    ContextFull,
    JournalDamaged,
    SessionBusy,
    SessionClosed,
    StaleTurn,
    TurnCut,
    UnknownSession,
)

CONTEXT_CODE = "context_length_exceeded"
"""The code agents look for to compact their history; OpenAI's word."""


class Refused(Exception):
    """A request that is answered with an error.

    Args:
        param: The field at fault, as a path in the request body.
        code: A word for programs.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.code = code or _CODES.get(status, "error")


_CODES = {
    400: "invalid_request_error",
    404: "not_found_error",
    409: "conflict_error",
    410: "session_gone",
    413: "request_too_large",
    415: "unsupported_media_type",
    500: "server_error",
    502: "engine_error",
    503: "overloaded_error",
}

_STATUS: tuple[tuple[type[MilesError], int], ...] = (
    (UnknownSession, 404),
    (SessionBusy, 409),
    (SessionClosed, 409),
    (StaleTurn, 409),
    (TurnCut, 409),
    (MatcherError, 500),
    (JournalDamaged, 500),
    (SessionError, 400),
    (DataError, 400),
    (EngineError, 502),
    (PluginError, 500),
    (ContractError, 500),
)


def refusal(error: MilesError) -> Refused:
    """The answer to a request that failed with `error`."""
    if isinstance(error, ContextFull):
        return Refused(400, str(error), param="messages", code=CONTEXT_CODE)
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
    return Refused(status, str(error), param="messages" if status == 400 else None)


def openai_error(problem: Refused) -> dict[str, Any]:
    kind = "invalid_request_error" if problem.status < 500 else "server_error"
    return {"error": {"message": problem.message, "type": kind, "param": problem.param, "code": problem.code}}


def anthropic_error(problem: Refused) -> dict[str, Any]:
    kinds = {400: "invalid_request_error", 404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}
    kind = kinds.get(problem.status, "invalid_request_error" if problem.status < 500 else "api_error")
    message = problem.message if problem.param is None else f"{problem.param}: {problem.message}"
    if problem.code == CONTEXT_CODE:
        message = f"prompt is too long: {problem.message}"
    return {"type": "error", "error": {"type": kind, "message": message}}
