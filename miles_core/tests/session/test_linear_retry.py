"""A linear session whose history is sent again, drifts or diverges: rolled back, matched or refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from miles_core.errors import EngineError, SessionError
from miles_core.session.assembly import assemble
from miles_core.session.default_family import DefaultFamily
from miles_core.session.linear import LinearSession
from miles_core.session.matching import loose_tool_call, role_content_only
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Message, ToolCall

Open = Callable[..., LinearSession]
U1, U2, U3 = (Message(role="user", content=text) for text in ("one", "two", "three"))
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


async def test_retry_rolls_back_one_checkpoint(open_session: Open, engine: Any) -> None:
    session = open_session()
    engine.replies = ["alpha", "beta", "gamma"]
    first = await session.complete([U1])
    kept = session.row.ids()
    second = await session.complete([U1, first.message, U2])
    await session.complete([U1, first.message, U3])
    assert list(engine.requests[2].token_ids[: len(kept)]) == kept
    assert [message.content for message in session.messages] == ["one", "alpha", "three", "gamma"]
    assert session.row.ids()[: len(kept)] == kept
    assert (session.discarded_turns, session.discarded_tokens) == (1, second.num_tokens)
    assert session.edited_turns == 0
    assemble(session, prompt_id="p").check()


async def test_retry_of_the_first_turn_rolls_back_to_the_empty_session(open_session: Open, engine: Any) -> None:
    session = open_session()
    await session.complete([U1])
    await session.complete([U2])
    assert [message.content for message in session.messages] == ["two", "ok"]
    assert session.row.ids()[: len(engine.requests[1].token_ids)] == list(engine.requests[1].token_ids)


async def test_a_history_that_diverges_earlier_is_refused_with_the_first_difference(
    open_session: Open, engine: Any
) -> None:
    session = open_session()
    first = await session.complete([U1])
    second = await session.complete([U1, first.message, U2])
    before = session.row.ids()
    for history in ([U3, first.message, U2, second.message, U3], [U1], [U1, Message(role="assistant", content="no")]):
        with pytest.raises(SessionError, match="diverges before the latest turn") as caught:
            await session.complete(history)
        assert "expected: message" in str(caught.value)
        assert session.row.ids() == before
    assert "content='no'" in str(caught.value)
    assert len(engine.requests) == 2


async def test_a_second_retry_may_not_reach_further_back(open_session: Open) -> None:
    session = open_session()
    first = await session.complete([U1])
    second = await session.complete([U1, first.message, U2])
    await session.complete([U1, first.message, U2, second.message, U3])
    with pytest.raises(SessionError, match="diverges"):
        await session.complete([U1, first.message, U3])


async def test_a_latest_answer_the_agent_edited_is_replaced_and_counted(open_session: Open, engine: Any) -> None:
    session = open_session()
    await session.complete([U1])
    edited = Message(role="assistant", content="mine")
    await session.complete([U1, edited, U2])
    assert session.edited_turns == 1
    trajectory = assemble(session, prompt_id="p")
    assert trajectory.metadata["edited_turns"] == 1
    assert trajectory.response_tokens == session.turns[-1].sampled
    assert [message.content for message in trajectory.messages] == ["one", "mine", "two", "ok"]


async def test_sending_the_stored_history_again_asks_for_one_more_answer(
    open_session: Open, engine: Any, tokenizer: ChatTokenizer
) -> None:
    session = open_session()
    answer = await session.complete([U1])
    row = session.row.ids()
    await session.complete([U1, answer.message])
    assert tokenizer.decode(engine.requests[1].token_ids[len(row) :]) == "\n<|im_start|>assistant\n"


async def test_an_engine_failure_during_a_retry_leaves_the_old_turn(open_session: Open, engine: Any) -> None:
    session = open_session()
    engine.replies = ["alpha", EngineError("lost")]
    answer = await session.complete([U1])
    before = session.row.ids()
    with pytest.raises(EngineError):
        await session.complete([U2])
    assert session.row.ids() == before
    assert session.messages == (U1, answer.message)


CALL_TEXT = 'x<tool_call>{"name": "f", "arguments": {"a": 1, "b": "y"}}</tool_call>'
RESULT = Message(role="user", content="result")


def respell(message: Message, arguments: str) -> Message:
    call = message.tool_calls[0]
    return Message(
        role="assistant",
        content=message.content,
        tool_calls=(ToolCall(id=call.id, name=call.name, arguments=arguments),),
    )


@pytest.mark.parametrize("spelling", ['{"b":"y","a":1}', '{ "a" : 1.0, "b": "y" }'])
async def test_reordered_or_respaced_arguments_match_loosely_and_the_stored_spelling_wins(
    open_session: Open, engine: Any, tokenizer: ChatTokenizer, spelling: str
) -> None:
    class Family(DefaultFamily):
        def append(self, stored: Sequence[Message], appended: Sequence[Message], tools: Any = ()) -> list[int]:
            assert stored[-1] == answer.message
            return super().append(stored, appended, tools)

    session = open_session(matcher=loose_tool_call, family=Family(None, tokenizer))
    engine.replies = [CALL_TEXT]
    answer = await session.complete([U1])
    row = session.row.ids()
    await session.complete([U1, respell(answer.message, spelling), RESULT])
    assert list(engine.requests[1].token_ids[: len(row)]) == row
    assert session.messages[1] == answer.message
    assert session.discarded_turns == 0


async def test_under_strict_the_same_drift_costs_the_turn_and_shows(open_session: Open, engine: Any) -> None:
    session = open_session()
    engine.replies = [CALL_TEXT]
    answer = await session.complete([U1])
    await session.complete([U1, respell(answer.message, "{}"), RESULT])
    assert (session.discarded_turns, session.edited_turns) == (1, 1)


async def test_role_content_only_keeps_the_stored_call_under_a_foreign_one(open_session: Open, engine: Any) -> None:
    session = open_session(matcher=role_content_only)
    engine.replies = [CALL_TEXT]
    answer = await session.complete([U1])
    await session.complete([U1, Message(role="assistant", content=answer.message.content), RESULT])
    assert session.messages[1].tool_calls == answer.message.tool_calls


async def test_a_dropped_turn_is_refused(open_session: Open) -> None:
    session = open_session()
    first = await session.complete([U1])
    second = await session.complete([U1, first.message, U2])
    with pytest.raises(SessionError, match="diverges"):
        await session.complete([U1, U2, second.message, U3])


async def test_call_ids_are_unique_within_the_session(open_session: Open, engine: Any) -> None:
    session = open_session()
    engine.replies = [CALL_TEXT, CALL_TEXT]
    first = await session.complete([U1])
    second = await session.complete([U1, first.message, RESULT])
    assert first.message.tool_calls[0].id == "call_0"
    assert second.message.tool_calls[0].id == "call_0_turn1"


async def test_tools_are_fixed_once_they_are_in_the_row(open_session: Open) -> None:
    session = open_session()
    answer = await session.complete([U1], [TOOL])
    with pytest.raises(SessionError, match="tools changed"):
        await session.complete([U1, answer.message, U2])
    await session.complete([U1, answer.message, U2], [{**TOOL}])
    other = open_session()
    await other.complete([U1], [TOOL])
    await other.complete([U2])  # back to the empty session: everything is rendered anew
