"""Chat Completions over loopback, with the official client."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from miles_core.session.serving.records import unpacked
from miles_core.testing.tiny import IM_END
from miles_core.testing.waiting import until
from miles_core.tokenizer import ChatTokenizer

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
CALL = 'Hm.\n<tool_call>\n{"name": "f", "arguments": {"b":1,  "a": 1.50}}\n</tool_call>'
U: dict[str, Any] = {"role": "user", "content": "hello"}


def client(url: str, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/sessions/{key}/v1", api_key="none", max_retries=0)


async def test_two_turns_with_a_tool_are_one_row_of_what_was_sampled(
    serve: Any, engine: Any, tokenizer: ChatTokenizer
) -> None:
    engine.replies += [CALL, "done"]
    async with serve() as served:
        key = await served.create()
        agent = client(served.url, key)
        first = await agent.chat.completions.create(model="m", messages=[U], tools=[TOOL])
        message = first.choices[0].message
        assert (first.choices[0].finish_reason, message.content) == ("tool_calls", "Hm.")
        assert message.tool_calls[0].function.arguments == '{"b":1,  "a": 1.50}'
        result = {"role": "tool", "content": "4", "tool_call_id": message.tool_calls[0].id}
        second = await agent.chat.completions.create(
            model="m", messages=[U, message.model_dump(exclude_none=True), result], tools=[TOOL]
        )
        assert second.choices[0].message.content == "done"
        (sample,) = await served.samples(key, prompt_id="p")
        await agent.close()
    ids, mask, logprobs = (unpacked(sample[name]) for name in ("token_ids", "loss_mask", "logprobs"))
    first_prompt, second_prompt = (request.token_ids for request in engine.requests)
    said = [*tokenizer.encode(CALL), IM_END]
    assert second_prompt[: len(first_prompt) + len(said)] == [*first_prompt, *said]
    assert ids.tolist() == [*second_prompt, *tokenizer.encode("done"), IM_END]
    assert ids[mask == 1].tolist() == [*said, *tokenizer.encode("done"), IM_END]
    assert (logprobs[mask == 1] < 0).all()
    assert sample["status"] == "completed"


async def test_a_stream_gives_tokens_while_they_are_sampled(serve: Any, engine: Any, tokenizer: ChatTokenizer) -> None:
    engine.replies += ["one two three"]
    engine.gate = asyncio.Event()
    async with serve() as served:
        key = await served.create()
        agent = client(served.url, key)
        stream = await agent.chat.completions.create(
            model="m", messages=[U], stream=True, stream_options={"include_usage": True}
        )
        text, usage = "", None
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                text += chunk.choices[0].delta.content
                engine.gate.set()  # the engine waits for this after its first token
            usage = chunk.usage or usage
        assert text == "one two three"
        assert usage is not None
        assert usage.completion_tokens == len(tokenizer.encode(text)) + 1
        await agent.close()


async def test_streamed_tool_calls_and_text_are_those_of_the_session(serve: Any, engine: Any) -> None:
    engine.replies += [CALL, CALL, "done"]
    async with serve() as served:
        key = await served.create()
        agent = client(served.url, key)
        history: list[Any] = [U]
        for _ in range(2):
            async with agent.chat.completions.stream(model="m", messages=history, tools=[TOOL]) as stream:
                final = await stream.get_final_completion()
            said = final.choices[0].message
            assert final.choices[0].finish_reason == "tool_calls"
            history += [
                said.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True),
                {"role": "tool", "content": "4", "tool_call_id": said.tool_calls[0].id},
            ]
        assert history[1]["tool_calls"][0]["id"] != history[3]["tool_calls"][0]["id"], "one id for each call"
        done = await agent.chat.completions.create(model="m", messages=history, tools=[TOOL])
        assert done.choices[0].message.content == "done"
        (sample,) = await served.samples(key)
        assert (sample["metadata"]["turns"], sample["metadata"]["discarded_turns"]) == (3, 0)
        await agent.close()


async def test_a_client_that_leaves_in_the_middle_changes_nothing(serve: Any, engine: Any) -> None:
    engine.replies += ["alpha beta", "alpha"]
    engine.gate = asyncio.Event()
    async with serve() as served:
        key = await served.create()
        async with served.http.stream(
            "POST", f"/sessions/{key}/v1/chat/completions", json={"messages": [U], "stream": True}
        ) as response:
            async for line in response.aiter_lines():
                if '"content":"a"' in line:
                    break
        entry = served.store.get(key)
        await served.idle(key)
        assert engine.closed_early == 1
        assert not entry.session.turns
        engine.gate = None
        assert (await served.chat(key, [U])).json()["choices"][0]["message"]["content"] == "alpha"
        (sample,) = await served.samples(key)
        assert sample["status"] == "completed"
        assert served.store.metrics.get("miles_clients_gone_total") == 1


async def test_a_client_that_leaves_a_whole_answer_frees_the_engine(serve: Any, engine: Any) -> None:
    engine.gate = asyncio.Event()
    async with serve() as served:
        key = await served.create()
        asking = asyncio.create_task(served.chat(key, [U]))
        await until(lambda: engine.requests)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await served.idle(key)
        assert engine.closed_early == 1
        engine.gate = None
        assert (await served.chat(key, [U])).status_code == 200


async def test_an_engine_that_fails_in_the_middle_of_a_stream_is_an_error_event(
    serve: Any, engine: Any, make_chunk: Any
) -> None:
    engine.replies += [[make_chunk([5], finish=None), make_chunk([6], logprobs=[0.5])]]
    async with serve() as served:
        key = await served.create()
        agent = client(served.url, key)
        with pytest.raises(openai.APIError, match="log-prob"):
            async for _ in await agent.chat.completions.create(model="m", messages=[U], stream=True):
                pass
        assert (await served.chat(key, [U])).status_code == 200
        await agent.close()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "n": ({"n": 2}, "n"),
    "ids": ({"input_ids": [1, 2]}, "input_ids"),
    "offsets": ({"routed_experts_start_len": 3}, "routed_experts_start_len"),
    "capture off": ({"logprobs": False}, "logprobs"),
    "alternatives": ({"logprobs": True, "top_logprobs": 5}, "top_logprobs"),
    "penalty": ({"frequency_penalty": 0.5}, "frequency_penalty"),
    "bias": ({"logit_bias": {"5": -100}}, "logit_bias"),
    "forced tool": ({"tool_choice": "required"}, "tool_choice"),
    "constrained": ({"response_format": {"type": "json_object"}}, "response_format"),
    "template": ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
    "unknown": ({"typical_p": 0.9}, "typical_p"),
    "unknown ids in a message": ({"messages": [{**U, "token_ids": [1]}]}, "messages.0.token_ids"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.0",
    ),
    "no messages": ({"messages": []}, "messages"),
    "odd role": ({"messages": [{"role": "narrator", "content": "x"}]}, "messages.0.role"),
    "temperature": ({"temperature": -1}, "temperature"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_cannot_be_served_is_refused_by_name(name: str, serve: Any, engine: Any) -> None:
    fields, param = REFUSED[name]
    async with serve() as served:
        key = await served.create()
        found = await served.http.post(f"/sessions/{key}/v1/chat/completions", json={"messages": [U], **fields})
        assert (found.status_code, found.json()["error"]["param"]) == (400, param), found.text
        assert not engine.requests


async def test_fields_that_ask_for_nothing_are_accepted(serve: Any) -> None:
    async with serve() as served:
        key = await served.create()
        neutral = {"n": 1, "frequency_penalty": 0, "logit_bias": {}, "user": "me", "tool_choice": "auto", "odd": None}
        assert (await served.chat(key, [U], **neutral)).status_code == 200


@pytest.mark.parametrize("header", ["x-session-id", "x-api-key", "authorization"])
async def test_a_header_names_the_session_too(header: str, serve: Any) -> None:
    async with serve() as served:
        key = await served.create()
        value = f"Bearer {key}" if header == "authorization" else key
        found = await served.http.post("/v1/chat/completions", json={"messages": [U]}, headers={header: value})
        assert found.status_code == 200
        assert len(served.store.get(key).session.turns) == 1
        nameless = await served.http.post("/v1/chat/completions", json={"messages": [U]})
        assert nameless.status_code == 400


async def test_the_agents_sampling_counts_or_is_overridden_and_reported(serve: Any, engine: Any) -> None:
    async with serve() as served:
        key = await served.create(temperature=0.5)
        await served.chat(key, [U], temperature=0.7, top_p=0.9, max_tokens=20)
        assert (engine.requests[0].params.temperature, engine.requests[0].params.top_p) == (0.7, 0.9)
        assert engine.requests[0].params.max_tokens == 20
        (sample,) = await served.samples(key)
        assert sample["temperature"] == 0.7
        later = await served.chat(key, [U, {"role": "assistant", "content": "ok"}, U], temperature=0.1)
        assert (later.status_code, later.json()["error"]["param"]) == (400, "temperature")
    async with serve(agent_sampling="override") as served:
        key = await served.create(temperature=0.5)
        await served.chat(key, [U], temperature=0.7, max_tokens=20)
        assert (engine.requests[1].params.temperature, engine.requests[1].params.max_tokens) == (0.5, 20)
        assert (await served.http.get(f"/sessions/{key}")).json()["overridden"] == {"temperature": 0.7}


async def test_logprobs_are_returned_to_who_asks_and_ids_to_nobody(
    serve: Any, engine: Any, tokenizer: ChatTokenizer
) -> None:
    engine.replies += ["né"]
    async with serve() as served:
        key = await served.create()
        found = (await served.chat(key, [U], logprobs=True)).json()
        content = found["choices"][0]["logprobs"]["content"]
        assert [each["logprob"] for each in content[:2]] == [-0.25, -0.5]
        assert len(content) == len(tokenizer.encode("né")) + 1
        assert "token_ids" not in str(found)
