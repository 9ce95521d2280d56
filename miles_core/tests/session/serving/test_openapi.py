"""The document names every route, and no request it allows, or nearly allows, breaks the server."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import schemas  # noqa: F401 - deep in a test, its import trips a bug of Python 3.11's ast
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.applications import Starlette
from starlette.testclient import TestClient

from miles_core.session.default_family import DefaultFamily
from miles_core.session.factory import SessionFactory
from miles_core.session.matching import strict
from miles_core.session.serving.app import make_app
from miles_core.session.serving.settings import ServerSettings
from miles_core.session.serving.store import SessionStore
from miles_core.types import SamplingParams

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def store(tokenizer: Any, new_engine: Any) -> SessionStore:
    factory = SessionFactory(
        [new_engine(tokenizer)], DefaultFamily(None, tokenizer), strict, context_length=4000, history="branching"
    )
    return SessionStore(factory, ServerSettings(sampling=SamplingParams(max_tokens=50), max_sessions=50))


@pytest.fixture(scope="module")
def app(store: SessionStore) -> Starlette:
    return make_app(store)


@pytest.fixture(scope="module")
def key(store: SessionStore) -> str:
    return store.create(SamplingParams(max_tokens=50)).key


@pytest.mark.parametrize(
    ("mode", "examples"),
    [
        pytest.param(GenerationMode.POSITIVE, 3, id="a few"),
        pytest.param(GenerationMode.POSITIVE, 25, id="allowed", marks=pytest.mark.slow),
        pytest.param(GenerationMode.NEGATIVE, 25, id="not allowed", marks=pytest.mark.slow),
    ],
)
def test_no_request_breaks_the_server(mode: GenerationMode, examples: int, app: Starlette, store: SessionStore) -> None:
    # Not through the pytest plugin, which wants another pytest; the strategies are all we need.
    api = schemathesis.openapi.from_asgi("/openapi.json", app)
    answered: Counter[int] = Counter()
    for found in api.get_all_operations():
        operation = found.ok()
        if examples < 10 and operation.path.startswith("/v1/"):
            continue  # the same handlers without a key in the path

        @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @seed(1)
        @given(operation.as_strategy(generation_mode=mode))
        def attack(case: Any) -> None:
            # Half of the requests reach a session; a deleted one is replaced.
            if case.path_parameters and len(str(case.body)) % 2:
                case.path_parameters["key"] = (store.entries or [store.create(SamplingParams(max_tokens=50))])[0].key
            response = case.call()
            answered[response.status_code] += 1
            case.validate_response(response, checks=CHECKS)

        try:
            attack()
        except Unsatisfiable:
            assert mode is GenerationMode.NEGATIVE, f"{operation.label}: no request can be made from its schema"
    assert sum(answered.values()) >= 5 * examples
    assert max(answered) < 500
    assert {200, 400} <= answered.keys() if mode is GenerationMode.POSITIVE else 400 in answered


def test_every_route_is_documented_and_nothing_else(app: Starlette) -> None:
    document = TestClient(app).get("/openapi.json").json()
    documented = {
        (method.upper(), path) for path, item in document["paths"].items() for method in item if method != "parameters"
    }
    routed = {(method, route.path) for route in app.routes for method in route.methods - {"HEAD"}}  # type: ignore[attr-defined]
    assert documented == routed
    names = [
        item[method]["operationId"] for item in document["paths"].values() for method in item.keys() - {"parameters"}
    ]
    assert len(set(names)) == len(names)


def test_the_document_is_openapi(app: Starlette) -> None:
    document = TestClient(app).get("/openapi.json").json()
    text = json.dumps(document)
    known = set(document["components"]["schemas"])
    assert {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]} <= known
