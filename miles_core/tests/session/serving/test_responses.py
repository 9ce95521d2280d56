"""OpenAI Responses over loopback, with the official client."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from miles_core.session.serving.records import unpacked
from miles_core.testing.tiny import IM_END
from miles_core.tokenizer import ChatTokenizer

TOOL: Any = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
CALL = 'Hm.\n<tool_call>\n{"name": "f", "arguments": {"b":1,  "a": 1.50}}\n</tool_call>'


def client(url: str, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/sessions/{key}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_two_turns_with_a_tool_are_one_row_of_what_was_sampled(
    stream: bool, by_id: bool, serve: Any, engine: Any, tokenizer: ChatTokenizer
) -> None:
    engine.replies += [CALL, "done"]
    async with serve() as served:
        key = await served.create()
        agent = client(served.url, key)
        items: list[Any] = [{"role": "user", "content": "hello"}]
        previous: dict[str, Any] = {}
        for turn in range(2):
            fields: Any = {"model": "m", "instructions": "Be brief.", "input": items, "tools": [TOOL], **previous}
            if stream:
                async with agent.responses.stream(**fields) as events:
                    answer = await events.get_final_response()
            else:
                answer = await agent.responses.create(**fields)
            if turn == 0:
                text, call = answer.output
                assert (text.content[0].text, call.arguments) == ("Hm.", '{"b":1,  "a": 1.50}')
                result = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
                outputs = [each.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for each in answer.output]
                items = [result] if by_id else [*items, *outputs, result]
                previous = {"previous_response_id": answer.id} if by_id else {}
        assert (answer.output_text, answer.status) == ("done", "completed")
        (sample,) = await served.samples(key)
        await agent.close()
    ids, mask = unpacked(sample["token_ids"]), unpacked(sample["loss_mask"])
    assert ids[mask == 1].tolist() == [*tokenizer.encode(CALL), IM_END, *tokenizer.encode("done"), IM_END]
    assert sample["metadata"]["discarded_turns"] == 0
    assert [message["role"] for message in sample["messages"]] == ["system", "user", "assistant", "tool", "assistant"]


async def test_a_stream_gives_tokens_while_they_are_sampled(serve: Any, engine: Any) -> None:
    engine.replies += ["one two three"]
    engine.gate = asyncio.Event()
    async with serve() as served:
        agent = client(served.url, await served.create())
        text, kinds = "", []
        async for event in await agent.responses.create(model="m", input="hello", stream=True):
            kinds.append(event.type)
            if event.type == "response.output_text.delta":
                text += event.delta
                engine.gate.set()
        assert text == "one two three"
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        await agent.close()


async def test_a_cut_turn_is_incomplete(serve: Any, engine: Any) -> None:
    async with serve() as served:
        agent = client(served.url, await served.create())
        from miles_core.types import FinishReason

        engine.replies += [[_cut(engine, FinishReason.LENGTH)]]
        answer = await agent.responses.create(model="m", input="hello")
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        await agent.close()


def _cut(engine: Any, reason: Any) -> Any:
    from dataclasses import replace

    return replace(engine.chunks("a")[0], finish_reason=reason)


async def test_a_retried_answer_can_no_longer_be_continued_by_its_id(serve: Any, engine: Any) -> None:
    engine.replies += ["alpha", "beta"]
    async with serve() as served:
        agent = client(served.url, await served.create())
        first = await agent.responses.create(model="m", input="hello")
        await agent.responses.create(model="m", input="hello")
        with pytest.raises(openai.BadRequestError, match="no turn"):
            await agent.responses.create(model="m", input="go on", previous_response_id=first.id)
        await agent.close()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "web_search_call"}]}, "input.0.type"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text"),
        ({"background": True}, "background"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0"),
        ({"input": [{"role": "user", "content": "x", "token_ids": [1]}]}, "input.0.token_ids"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(fields: dict[str, Any], param: str, serve: Any) -> None:
    async with serve() as served:
        key = await served.create()
        found = await served.http.post(f"/sessions/{key}/v1/responses", json={"input": "hello", **fields})
        assert (found.status_code, found.json()["error"]["param"]) == (400, param), found.text
