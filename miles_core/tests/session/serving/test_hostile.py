"""What agents and models send that no well-meaning one would: a refusal with a reason, never a 5xx, never a lie."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from miles_core.testing.waiting import until

U = {"role": "user", "content": "hello"}
OK = {"role": "assistant", "content": "ok"}


def called(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
@pytest.mark.parametrize(
    "said", [called('"f"', '"\\ud800"'), called('"\\ud800"', "{}"), called('"f"', '{"a": "\\ud800", "b": 1e999}')]
)
async def test_a_call_that_spells_no_text_costs_no_trajectory(
    said: str, path: str, stream: bool, serve: Any, engine: Any
) -> None:
    engine.replies += [said]
    async with serve() as served:
        key = await served.create()
        body = {"input": "hello"} if path == "responses" else {"messages": [U]}
        found = await served.http.post(f"/sessions/{key}/v1/{path}", json={**body, "stream": stream})
        assert found.status_code == 200
        parts = [line[6:] for line in found.text.splitlines() if line.startswith("data: {")] if stream else [found.text]
        for part in parts:
            assert json.loads(part, parse_constant=pytest.fail).get("type") != "error"
            assert "server_error" not in part
        assert (await served.http.get(f"/sessions/{key}")).status_code == 200
        (sample,) = await served.samples(key)
        assert sample["status"] == "completed"


async def test_arguments_beyond_json_come_back_as_they_were_sampled(serve: Any, engine: Any) -> None:
    engine.replies += [called('"f"', '{"a": 1e999}'), "done"]
    async with serve() as served:
        key = await served.create()
        path = f"/sessions/{key}/v1/messages"
        content = (await served.http.post(path, json={"messages": [U]})).json()["content"]
        assert content[0]["input"] == {"_raw": '{"a": 1e999}'}
        result = {"type": "tool_result", "tool_use_id": content[0]["id"], "content": "4"}
        history = [U, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
        assert (await served.http.post(path, json={"messages": history})).status_code == 200
        assert len(served.store.get(key).session.turns) == 2


@pytest.mark.parametrize("value", [1, {"kinds": [1]}, {"kinds": {"a": "b"}}, {"kinds": {"mine": 7}}])
async def test_nobody_else_says_how_rows_differ(value: Any, serve: Any) -> None:
    async with serve() as served:
        key = await served.create()
        await served.chat(key, [U])
        body = {"metadata": {"tito_session_mismatch": value}}
        found = await served.http.post(f"/sessions/{key}/samples", json=body)
        assert found.status_code == 400
        assert found.json()["error"]["param"] == "metadata.tito_session_mismatch"
        assert served.store.metrics.get("miles_tito_session_mismatch_total", kind="mine") == 0


@pytest.mark.parametrize("history", ["linear", "branching"])
@pytest.mark.parametrize("fact", ["turns", "finish_reasons", "cached_tokens"])
async def test_facts_of_the_server_are_not_the_agents_to_state(fact: str, history: str, serve: Any) -> None:
    async with serve(history=history) as served:
        key = await served.create()
        await served.chat(key, [U])
        found = await served.http.post(f"/sessions/{key}/samples", json={"metadata": {fact: 7}})
        assert found.status_code == 400
        assert found.json()["error"]["param"] == f"metadata.{fact}"
        found = await served.http.post(f"/sessions/{key}/samples", json={"metadata": {"task": 7}})
        (sample,) = found.json()["samples"]
        assert (sample["metadata"]["task"], sample["metadata"]["turns"]) == (7, 1)


async def test_counting_tokens_says_nothing_about_the_trajectory(serve: Any) -> None:
    async with serve(context_length=100) as served:
        key = await served.create()
        await served.chat(key, [U])
        body = {"messages": [U, OK, {"role": "user", "content": "x " * 500}]}
        counted = await served.http.post(f"/sessions/{key}/v1/messages/count_tokens", json=body)
        assert counted.status_code == 200
        assert counted.json()["input_tokens"] > 500, "also where the prompt does not fit"
        assert [sample["status"] for sample in await served.samples(key)] == ["completed"]
        assert (await served.http.post(f"/sessions/{key}/v1/messages", json=body)).status_code == 400
        assert [sample["status"] for sample in await served.samples(key)] == ["truncated"]


async def test_reasoning_may_come_back_as_text(serve: Any, engine: Any) -> None:
    async with serve() as served:
        key = await served.create()
        items = [U, {"type": "reasoning", "content": "hm"}, {"role": "assistant", "content": "ok"}, U]
        found = await served.http.post(f"/sessions/{key}/v1/responses", json={"input": items})
        assert found.status_code == 200
        assert served.store.get(key).session.messages[1].reasoning == "hm"


async def test_turns_under_way_at_once_never_share_a_seed(serve: Any, engine: Any) -> None:
    engine.gate = asyncio.Event()
    async with serve(history="branching") as served:
        key = await served.create(seed=5)
        left = asyncio.create_task(served.chat(key, [U]))
        await until(lambda: len(engine.requests) >= 1)
        stays = asyncio.create_task(served.chat(key, [U]))
        await until(lambda: len(engine.requests) >= 2)
        left.cancel()
        await until(lambda: engine.closed_early)
        others = [asyncio.create_task(served.chat(key, [U])) for _ in range(3)]
        await until(lambda: len(engine.requests) >= 5)
        engine.gate.set()
        await asyncio.gather(stays, *others)
        first, *rest = [(request.request_id, request.params.seed) for request in engine.requests]
        assert len(set(rest)) == len(rest) == len({seed for _, seed in rest})
        assert first in rest, "what was given up is asked again under its own number"
