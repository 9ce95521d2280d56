"""The OpenAPI document of a session server, made from the models that validate its requests."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from miles_core.session.serving import anthropic, chat, control, responses

Doc = dict[str, Any]
REF = "#/components/schemas/{model}"
KEY = {
    "name": "key",
    "in": "path",
    "required": True,
    "description": "The session, as POST /sessions named it.",
    "schema": {"type": "string", "minLength": 1},
}
HEADER = {
    "name": "X-Session-Id",
    "in": "header",
    "required": False,
    "description": "The session; the API key (Authorization: Bearer, x-api-key) is taken where it is absent.",
    "schema": {"type": "string"},
}
MODELS: tuple[type[BaseModel], ...] = (
    chat.ChatRequest,
    anthropic.MessagesRequest,
    responses.ResponsesRequest,
    control.CreateSession,
    control.CollectSamples,
)
ERRORS = {
    "400": "The request cannot be served; `param` names the field.",
    "404": "No such session.",
    "409": "The session is busy, closed, or its turn was cut off.",
    "410": "The session was closed; the message says why.",
    "413": "The body is too long.",
    "500": "The matcher, a plugin or the server failed.",
    "502": "The engine failed; the session is as it was.",
    "503": "All sessions are in use.",
}


def document(version: str) -> Doc:
    """The document for a server of the given version."""
    _, schemas = models_json_schema([(model, "validation") for model in MODELS], ref_template=REF)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Miles session server",
            "version": version,
            "description": "Sessions own token ids; agents see messages. See docs/sessions.md.",
        },
        "paths": {**_control(), **_turns()},
        "components": {"schemas": {**schemas["$defs"], **_ANSWERS}},
    }


def _control() -> Doc:
    created = {"201": _json("A new session.", "SessionCreated"), **_errors("400", "409", "413", "503")}
    read = {"200": _json("Its turns, without token ids.", "Session"), **_errors("404", "410")}
    gone = {"204": {"description": "Closed, turns under way cancelled."}, **_errors("404", "409", "410")}
    samples = {"200": _json("Its trajectories.", "Samples"), **_errors("400", "404", "410", "413", "500")}
    return {
        "/health": {"get": _operation("health", "Is the server up?", {"200": _json("It is.", "Health")})},
        "/metrics": {
            "get": _operation(
                "metrics",
                "Counters for Prometheus",
                {
                    "200": {
                        "description": "Text format 0.0.4.",
                        "content": {"text/plain": {"schema": {"type": "string"}}},
                    }
                },
            )
        },
        "/openapi.json": {
            "get": _operation("openapi", "This document", {"200": _json("OpenAPI 3.1.", "Object")}),
        },
        "/sessions": {
            "post": _operation("createSession", "Open a session", created, body="CreateSession", needed=False)
        },
        "/sessions/{key}": {
            "parameters": [KEY],
            "get": _operation("readSession", "What a session holds", read),
            "delete": _operation("deleteSession", "Close a session for good", gone),
        },
        "/sessions/{key}/samples": {
            "parameters": [KEY],
            "post": _operation(
                "collectSamples", "Trajectories of a session", samples, body="CollectSamples", needed=False
            ),
        },
        "/sessions/{key}/v1/models": {"parameters": [KEY], "get": _models("sessionModels")},
        "/v1/models": {"get": _models("models")},
    }


def _turns() -> Doc:
    found: Doc = {}
    for path, model, summary, answer in (
        ("/v1/chat/completions", "ChatRequest", "OpenAI Chat Completions", "ChatCompletion"),
        ("/v1/messages", "MessagesRequest", "Anthropic Messages", "Message"),
        ("/v1/responses", "ResponsesRequest", "OpenAI Responses", "Response"),
        ("/v1/messages/count_tokens", "MessagesRequest", "Tokens of a prompt", "TokenCount"),
    ):
        streams = answer != "TokenCount"
        codes = ("400", "404", "409", "410", "413", "500", *(("502",) if streams else ()))
        answers = {"200": _json("The answer, or its event stream.", answer, streams=streams), **_errors(*codes)}
        name = path.removeprefix("/v1/").replace("/", "_")
        found[f"/sessions/{{key}}{path}"] = {
            "parameters": [KEY],
            "post": _operation(f"session_{name}", summary, answers, body=model),
        }
        found[path] = {"parameters": [HEADER], "post": _operation(name, summary, answers, body=model)}
    return found


def _models(name: str) -> Doc:
    return _operation(name, "The one model that is served", {"200": _json("A list of one.", "Models")})


def _operation(name: str, summary: str, answers: Doc, *, body: str | None = None, needed: bool = True) -> Doc:
    found: Doc = {"operationId": name, "summary": summary, "responses": answers}
    if body is not None:
        content = {"application/json": {"schema": {"$ref": REF.format(model=body)}}}
        found["requestBody"] = {"required": needed, "content": content}
    return found


def _json(text: str, model: str, *, streams: bool = False) -> Doc:
    content: Doc = {"application/json": {"schema": {"$ref": REF.format(model=model)}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {"description": text, "content": content}


def _errors(*codes: str) -> Doc:
    return {code: _json(ERRORS[code], "Error") for code in codes}


def _object(required: str = "", **properties: Doc) -> Doc:
    return {"type": "object", "required": required.split(), "properties": properties}


_TEXT: Doc = {"type": "string"}
_LIST: Doc = {"type": "array", "items": {"type": "object"}}
_ANSWERS: Doc = {
    "Object": _object(),
    "Error": _object("error", error=_object("message", message=_TEXT)),
    "Health": _object("status sessions model", status={"const": "ok"}, sessions={"type": "integer"}, model=_TEXT),
    "SessionCreated": _object("session_id path", session_id=_TEXT, path=_TEXT),
    "Session": _object("session_id history records sampling", session_id=_TEXT, history=_TEXT, records=_LIST),
    "Samples": _object("session_id samples", session_id=_TEXT, samples=_LIST),
    "Models": _object("object data", object={"const": "list"}, data=_LIST),
    "ChatCompletion": _object("id object created model choices usage", id=_TEXT, choices=_LIST),
    "Message": _object("id type role content stop_reason usage", id=_TEXT, type={"const": "message"}, content=_LIST),
    "Response": _object("id object status output usage", id=_TEXT, object={"const": "response"}, output=_LIST),
    "TokenCount": _object("input_tokens", input_tokens={"type": "integer", "minimum": 0}),
}
