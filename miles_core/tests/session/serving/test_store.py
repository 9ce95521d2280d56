"""Sessions on a server: concurrency, deletion, limits, metrics."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest

from miles_core.errors import EngineError
from miles_core.session.matching import role_content_only, strict, warning_of
from miles_core.testing.waiting import until

U = {"role": "user", "content": "hello"}
OK = {"role": "assistant", "content": "ok"}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def started(engine: Any, count: int) -> None:
    await until(lambda: len(engine.requests) >= count, "a request to the engine")


async def test_a_double_submit_to_a_linear_session_is_a_conflict_and_hurts_nobody(serve: Any, engine: Any) -> None:
    engine.gate = asyncio.Event()
    async with serve() as served:
        key = await served.create()
        first = asyncio.create_task(served.chat(key, [U]))
        await started(engine, 1)
        second = await served.chat(key, [U])
        assert (second.status_code, second.json()["error"]["code"]) == (409, "conflict_error")
        engine.gate.set()
        assert (await first).status_code == 200
        assert len(served.store.get(key).session.turns) == 1


async def test_the_official_client_repeats_a_conflict_by_itself(serve: Any, engine: Any) -> None:
    engine.gate = asyncio.Event()
    async with serve() as served:
        key = await served.create()
        first = asyncio.create_task(served.chat(key, [U]))
        await started(engine, 1)
        agent = openai.AsyncOpenAI(base_url=f"{served.url}/sessions/{key}/v1", api_key="none", max_retries=10)
        messages: Any = [U, OK, U]
        second = asyncio.create_task(agent.chat.completions.create(model="m", messages=messages))
        await asyncio.sleep(0.05)
        engine.gate.set()
        assert (await first).status_code == 200
        assert (await second).choices[0].message.content == "ok"
        await agent.close()


async def test_a_double_submit_to_a_branching_session_makes_siblings(serve: Any, engine: Any) -> None:
    async with serve(history="branching") as served:
        key = await served.create()
        answers = await asyncio.gather(*(served.chat(key, [U]) for _ in range(5)))
        assert [answer.status_code for answer in answers] == [200] * 5
        record = (await served.http.get(f"/sessions/{key}")).json()
        assert record["leaves"] == [0, 1, 2, 3, 4]
        assert len({answer.json()["id"] for answer in answers}) == 5
        assert len(await served.samples(key)) == 5


async def test_deleting_a_session_ends_its_turn_and_frees_the_engine(serve: Any, engine: Any) -> None:
    engine.gate = asyncio.Event()
    async with serve() as served:
        key = await served.create()
        turn = asyncio.create_task(served.chat(key, [U]))
        await started(engine, 1)
        assert (await served.http.delete(f"/sessions/{key}")).status_code == 204
        assert (await turn).status_code == 409
        assert engine.closed_early == 1
        assert (await served.http.delete(f"/sessions/{key}")).status_code == 410
        gone = await served.chat(key, [U])
        assert (gone.status_code, "deleted" in gone.json()["error"]["message"]) == (410, True)
        assert served.store.factory.load() == (0,)
        assert (await served.chat("f" * 32, [U])).status_code == 404


async def test_a_stream_of_a_deleted_session_ends_with_an_error_event(serve: Any, engine: Any) -> None:
    engine.gate = asyncio.Event()
    async with serve() as served:
        key = await served.create()
        agent = openai.AsyncOpenAI(base_url=f"{served.url}/sessions/{key}/v1", api_key="none", max_retries=0)
        messages: Any = [U]
        stream = await agent.chat.completions.create(model="m", messages=messages, stream=True)
        await started(engine, 1)
        await served.http.delete(f"/sessions/{key}")
        with pytest.raises(openai.APIError, match="deleted"):
            async for _ in stream:
                pass
        await agent.close()


async def test_a_thousand_sessions_are_open_at_once_and_each_keeps_its_own_row(serve: Any, engine: Any) -> None:
    engine.replies = ["ok"] * 2000
    async with serve() as served:
        keys = [served.store.create(served.store.settings.sampling).key for _ in range(1000)]
        limit = asyncio.Semaphore(64)

        async def turn(number: int) -> int:
            async with limit:
                return (await served.chat(keys[number], [{"role": "user", "content": f"number {number}"}])).status_code

        asked = range(0, 1000, 8)
        assert set(await asyncio.gather(*map(turn, asked))) == {200}
        for number in asked:
            assert served.store.get(keys[number]).session.messages[0].content == f"number {number}"
        assert served.store.factory.load() == (1000,)


async def test_nobody_elses_session_can_be_guessed(serve: Any) -> None:
    async with serve() as served:
        keys = {await served.create() for _ in range(20)}
        assert len(keys) == 20
        assert all(len(key) == 32 for key in keys)


# --- limits -----------------------------------------------------------------------------------------------------------


async def test_idle_sessions_are_closed_and_used_ones_are_not(serve: Any, engine: Any) -> None:
    clock = Clock()
    engine.gate = asyncio.Event()
    async with serve(idle_timeout_s=10.0, clock=clock) as served:
        idle, used = await served.create(), await served.create()
        turn = asyncio.create_task(served.chat(used, [U]))
        await started(engine, 1)
        clock.now = 11.0
        served.store.sweep()
        assert [entry.key for entry in served.store.entries] == [used]
        engine.gate.set()
        assert (await turn).status_code == 200
        await served.idle(used)
        clock.now = 20.0
        served.store.sweep()
        assert len(served.store) == 1, "its time counts from its last use"
        found = await served.chat(idle, [U])
        assert (found.status_code, "10 s" in found.json()["error"]["message"]) == (410, True)
        assert served.store.metrics.get("miles_sessions_closed_total", reason="idle") == 1


async def test_memory_beyond_the_cap_closes_the_least_recently_used(serve: Any, engine: Any) -> None:
    async with serve(max_bytes=20_000) as served:
        keys = [await served.create() for _ in range(3)]
        for key in keys:
            await served.chat(key, [{"role": "user", "content": "x" * 700}])
        await served.chat(keys[0], [U])  # a retry of its first turn; now keys[1] is the oldest
        engine.gate = asyncio.Event()
        busy = asyncio.create_task(served.chat(keys[1], [{"role": "user", "content": "x" * 700}, OK, U]))
        await started(engine, 5)
        served.store.limit()
        assert served.store.size_bytes <= 20_000
        assert keys[1] in [entry.key for entry in served.store.entries], "one in use is never closed"
        assert keys[2] not in [entry.key for entry in served.store.entries]
        engine.gate.set()
        assert (await busy).status_code == 200


async def test_a_full_server_makes_room_or_says_so(serve: Any, engine: Any) -> None:
    engine.gate = asyncio.Event()
    async with serve(max_sessions=2) as served:
        keys = [await served.create() for _ in range(3)]
        assert [entry.key for entry in served.store.entries] == keys[1:]
        turns = [asyncio.create_task(served.chat(key, [U])) for key in keys[1:]]
        await started(engine, 2)
        assert (await served.http.post("/sessions")).status_code == 503
        engine.gate.set()
        await asyncio.gather(*turns)


async def test_bodies_are_bounded_and_must_be_json(serve: Any) -> None:
    async with serve(max_body_bytes=1000) as served:
        key = await served.create()
        assert (await served.chat(key, [{"role": "user", "content": "x" * 2000}])).status_code == 413
        for body in (
            b"{",
            b"[]",
            b'{"messages": NaN}',
            b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
            b"\xff",
        ):
            found = await served.http.post(f"/sessions/{key}/v1/chat/completions", content=body)
            assert found.status_code == 400, body


# --- failures ---------------------------------------------------------------------------------------------------------


async def test_an_engine_that_fails_is_a_bad_gateway_and_a_failed_sample(serve: Any, engine: Any) -> None:
    engine.replies += [EngineError("lost")]
    async with serve() as served:
        key = await served.create()
        found = await served.chat(key, [U])
        assert (found.status_code, found.json()["error"]["code"]) == (502, "engine_error")
        (sample,) = await served.samples(key)
        assert (sample["status"], sample["failure"]["boundary"]) == ("failed", "engine")
        assert (await served.chat(key, [U])).status_code == 200


@pytest.mark.parametrize("answer", [1, None, ValueError("no")])
async def test_a_matcher_that_fails_is_named_in_a_500(answer: Any, serve: Any) -> None:
    def odd_matcher(stored: Any, replayed: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    async with serve(matcher=odd_matcher) as served:
        key = await served.create()
        await served.chat(key, [U])
        found = await served.chat(key, [U, OK, U])
        assert found.status_code == 500
        assert "odd_matcher" in found.json()["error"]["message"]


async def test_a_diverging_history_shows_the_first_difference(serve: Any) -> None:
    async with serve() as served:
        key = await served.create()
        await served.chat(key, [U])
        await served.chat(key, [U, OK, U])
        found = await served.chat(key, [{"role": "user", "content": "other"}])
        assert found.status_code == 400
        assert "'hello'" in found.json()["error"]["message"]
        assert "'other'" in found.json()["error"]["message"]
        assert (await served.chat(key, [U, OK, U, OK, U])).status_code == 200


async def test_a_full_context_is_the_error_agents_compact_at_and_a_truncated_sample(serve: Any) -> None:
    async with serve(context_length=60) as served:
        key = await served.create()
        await served.chat(key, [U])
        found = await served.chat(key, [U, OK, {"role": "user", "content": "x" * 100}])
        assert (found.status_code, found.json()["error"]["code"]) == (400, "context_length_exceeded")
        (sample,) = await served.samples(key)
        assert sample["status"] == "truncated"


async def test_metrics_count_what_happened(serve: Any) -> None:
    async with serve() as served:
        key = await served.create()
        await served.chat(key, [U])
        await served.chat(key, [U], n=2)
        await served.samples(key)
        text = (await served.http.get("/metrics")).text
        for line in (
            "miles_sessions_open 1",
            'miles_requests_total{protocol="chat",status="200"} 1',
            'miles_requests_total{protocol="chat",status="400"} 1',
            'miles_turns_total{finish_reason="stop"} 1',
            'miles_samples_total{status="completed"} 1',
        ):
            assert line in text
        assert (await served.http.get("/health")).json()["sessions"] == 1


async def test_two_servers_cannot_have_one_port(serve: Any) -> None:
    async with serve() as served:
        port = httpx.URL(served.url).port
        from miles_core.errors import RunError
        from miles_core.session.serving.runner import listening

        with pytest.raises(RunError, match="cannot listen"):
            async with listening(served.store, port=port or 0):
                pass


def test_the_matcher_that_merges_turns_comes_with_a_warning() -> None:
    assert "role-content-only" in (warning_of(role_content_only) or "")
    assert warning_of(strict) is None
