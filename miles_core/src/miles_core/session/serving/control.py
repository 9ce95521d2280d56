"""The routes that create, read, collect and delete sessions, and those for health and metrics."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from miles_core.contracts.tokens import MISMATCH
from miles_core.session.assembly import assemble_all
from miles_core.session.leaves import PICKERS
from miles_core.session.refusals import UnknownSession
from miles_core.session.serving.fields import validated
from miles_core.session.serving.http import Json, read_object
from miles_core.session.serving.problems import Refused
from miles_core.session.serving.records import record, sample
from miles_core.session.serving.store import SessionStore

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class Sampling(Body):
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**53)] | None = None


class CreateSession(Body):
    """How the new session samples. For what is left out, the settings count that the server was started with."""

    sampling: Sampling = Sampling()


class CollectSamples(Body):
    prompt_id: str = ""
    """Copied into every sample."""
    leaves: Literal["all", "drop-retries", "longest"] | None = None
    """Which leaves of a branching history become samples; null takes what the server was started with."""
    metadata: dict[str, Any] = {}
    """Copied into every sample; facts that the server states itself, such as `turns`, are refused."""


def routes(store: SessionStore) -> list[Route]:
    """All routes that do not ask for a turn."""
    return [
        Route("/health", _with(store, _health), methods=["GET"]),
        Route("/metrics", _with(store, _metrics), methods=["GET"]),
        Route("/sessions", _with(store, _create), methods=["POST"]),
        Route("/sessions/{key}", _with(store, _read), methods=["GET"]),
        Route("/sessions/{key}", _with(store, _delete), methods=["DELETE"]),
        Route("/sessions/{key}/samples", _with(store, _samples), methods=["POST"]),
        Route("/sessions/{key}/v1/models", _with(store, _models), methods=["GET"]),
        Route("/v1/models", _with(store, _models), methods=["GET"]),
    ]


def _with(store: SessionStore, endpoint: Any) -> Any:
    async def bound(request: Request) -> Response:
        found: Response = await endpoint(store, request)
        return found

    return bound


async def _health(store: SessionStore, request: Request) -> Response:
    return Json({"status": "ok", "sessions": len(store), "model": store.settings.model})


async def _metrics(store: SessionStore, request: Request) -> Response:
    gauges = {
        "miles_sessions_open": float(len(store)),
        "miles_session_bytes": float(store.size_bytes),
        "miles_requests_in_flight": float(sum(len(entry.running) for entry in store.entries)),
    }
    return PlainTextResponse(store.metrics.render(gauges), media_type=PROMETHEUS)


async def _create(store: SessionStore, request: Request) -> Response:
    body = validated(CreateSession, await read_object(request, store.settings.max_body_bytes))
    entry = store.create(replace(store.settings.sampling, **body.sampling.model_dump(exclude_none=True)))
    return Json({"session_id": entry.key, "path": f"/sessions/{entry.key}"}, 201)


async def _read(store: SessionStore, request: Request) -> Response:
    with store.using(request.path_params["key"]) as entry:
        return Json(record(entry))


async def _delete(store: SessionStore, request: Request) -> Response:
    key = request.path_params["key"]
    if store.get(key).owned:
        raise Refused(409, "the session belongs to a run, which closes it")
    try:
        store.close(key, "it was deleted", label="deleted")
    except UnknownSession as error:
        raise Refused(404, str(error)) from error
    return Response(status_code=204)


async def _samples(store: SessionStore, request: Request) -> Response:
    body = validated(CollectSamples, await read_object(request, store.settings.max_body_bytes))
    picker = store.settings.picker if body.leaves is None else PICKERS[body.leaves]
    with store.using(request.path_params["key"]) as entry:
        found = assemble_all(entry.session, prompt_id=body.prompt_id, picker=picker)
    facts = {MISMATCH}.union(*(trajectory.metadata for trajectory in found))
    if taken := sorted(facts & body.metadata.keys()):
        raise Refused(400, "the server alone says this of a sample", param=f"metadata.{taken[0]}")
    family = store.settings.family
    for trajectory in found:
        store.metrics.add("miles_samples_total", status=trajectory.status.value)
        kinds = trajectory.metadata.get(MISMATCH, {}).get("kinds")
        if kinds is not None:
            store.metrics.add("miles_tito_session_checked_total", family=family)
        for kind, count in (kinds or {}).items():
            store.metrics.add("miles_tito_session_mismatch_total", count, family=family, kind=kind)
    samples = [sample(replace(each, metadata={**each.metadata, **body.metadata})) for each in found]
    return Json({"session_id": request.path_params["key"], "samples": samples})


async def _models(store: SessionStore, request: Request) -> Response:
    model = {"id": store.settings.model, "object": "model", "created": 0, "owned_by": "miles"}
    return Json({"object": "list", "data": [model]})
