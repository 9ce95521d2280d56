"""Anthropic Messages over loopback, with the official client."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import pytest

from miles_core.session.serving.arguments import as_object, exact
from miles_core.session.serving.records import unpacked
from miles_core.testing.tiny import IM_END
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import ToolCall

TOOL: Any = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {}}}
CALL = 'Hm.\n<tool_call>\n{"name": "f", "arguments": {"b":1,  "a": 1.50}}\n</tool_call>'
U: Any = {"role": "user", "content": "hello"}


def client(url: str, key: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=f"{url}/sessions/{key}", api_key="none", max_retries=0)


def answered(call: Any) -> Any:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "4"}]}


@pytest.mark.parametrize("stream", [False, True])
async def test_two_turns_with_a_tool_are_one_row_of_what_was_sampled(
    stream: bool, serve: Any, engine: Any, tokenizer: ChatTokenizer
) -> None:
    engine.replies += [CALL, "done"]
    async with serve() as served:
        key = await served.create()
        agent = client(served.url, key)
        history: list[Any] = [U]
        for turn in range(2):
            fields: Any = {"model": "m", "max_tokens": 300, "system": "Be brief.", "messages": history, "tools": [TOOL]}
            if stream:
                async with agent.messages.stream(**fields) as events:
                    message = await events.get_final_message()
            else:
                message = await agent.messages.create(**fields)
            if turn == 0:
                text, call = message.content
                assert (message.stop_reason, text.text, call.input) == ("tool_use", "Hm.", {"b": 1, "a": 1.5})
                history += [{"role": "assistant", "content": message.content}, answered(call)]
        assert (message.stop_reason, message.content[0].text) == ("end_turn", "done")
        assert message.usage.output_tokens == len(tokenizer.encode("done")) + 1
        (sample,) = await served.samples(key)
        await agent.close()
    ids, mask = unpacked(sample["token_ids"]), unpacked(sample["loss_mask"])
    said = [*tokenizer.encode(CALL), IM_END, *tokenizer.encode("done"), IM_END]
    assert ids[mask == 1].tolist() == said
    assert sample["metadata"]["discarded_turns"] == 0
    assert [message["role"] for message in sample["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert sample["messages"][2]["tool_calls"][0]["function"]["arguments"] == '{"b":1,  "a": 1.50}'


async def test_a_stream_gives_tokens_while_they_are_sampled(serve: Any, engine: Any) -> None:
    engine.replies += ["one two three"]
    engine.gate = asyncio.Event()
    async with serve() as served:
        agent = client(served.url, await served.create())
        text = ""
        async with agent.messages.stream(model="m", max_tokens=300, messages=[U]) as stream:
            async for piece in stream.text_stream:
                text += piece
                engine.gate.set()
        assert text == "one two three"
        await agent.close()


async def test_text_between_calls_is_one_content(serve: Any, engine: Any) -> None:
    block = '<tool_call>\n{"name": "f"}\n</tool_call>'
    engine.replies += [f"a {block} b {block}", "done"]
    async with serve() as served:
        key = await served.create()
        agent = client(served.url, key)
        async with agent.messages.stream(model="m", max_tokens=300, messages=[U], tools=[TOOL]) as events:
            message = await events.get_final_message()
        assert [part.type for part in message.content] == ["text", "tool_use", "text", "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": each.id} for each in message.content[1::2]]
        history: Any = [U, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
        await agent.messages.create(model="m", max_tokens=300, messages=history, tools=[TOOL])
        (sample,) = await served.samples(key)
        assert (sample["metadata"]["turns"], sample["metadata"]["discarded_turns"]) == (2, 0)
        await agent.close()


async def test_tokens_are_counted_without_sampling(serve: Any, engine: Any) -> None:
    async with serve() as served:
        key = await served.create()
        agent = client(served.url, key)
        counted = await agent.messages.count_tokens(model="m", messages=[U])
        await agent.messages.create(model="m", max_tokens=9, messages=[U])
        assert counted.input_tokens == len(engine.requests[0].token_ids)
        assert len(engine.requests) == 1
        await agent.close()


async def test_errors_have_the_shape_the_client_knows(serve: Any) -> None:
    async with serve(context_length=40) as served:
        agent = client(served.url, await served.create())
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            await agent.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "x" * 200}])
        with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
            await agent.messages.create(model="m", max_tokens=9, messages=[U], tool_choice={"type": "any"})
        picture: Any = {"type": "image", "source": {"type": "url", "url": "x"}}
        with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content\.0"):
            await agent.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": [picture]}])
        gone = client(served.url, "0" * 32)
        with pytest.raises(anthropic.NotFoundError):
            await gone.messages.create(model="m", max_tokens=9, messages=[U])
        await gone.close()
        await agent.close()


@pytest.mark.parametrize("text", ['{"b":1,  "a": 1.50}', "", "  ", "[1]", "{broken", '{"x": NaN}', '{"a":1,"a":2}'])
def test_replayed_objects_are_the_text_they_were_made_from(text: str) -> None:
    call = ToolCall(id="c", name="f", arguments=text)
    assert exact("c", as_object(text), {"c": [call]}) == text


def test_changed_objects_are_spelled_anew() -> None:
    calls = {"c": [ToolCall(id="c", name="f", arguments='{"a":1}')]}
    assert exact("c", {"a": True}, calls) == '{"a": true}'
    assert exact("other", {"a": 1}, calls) == '{"a": 1}'
