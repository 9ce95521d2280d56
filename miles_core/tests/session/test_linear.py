from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from miles_core.errors import EngineError, SessionError
from miles_core.session.assembly import assemble
from miles_core.session.default_family import DefaultFamily
from miles_core.session.linear import LinearSession
from miles_core.session.seeds import turn_seed
from miles_core.testing.tiny import IM_END
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import UNRECORDED, FinishReason, Message, Status

Open = Callable[..., LinearSession]
U1, U2, U3 = (Message(role="user", content=text) for text in ("one", "two", "three"))
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


async def test_the_first_turn_renders_and_later_ones_extend_the_very_row(
    open_session: Open, engine: Any, tokenizer: ChatTokenizer
) -> None:
    session = open_session()
    engine.replies = ["alpha", "beta"]
    first = await session.complete([U1])
    row = [*engine.requests[0].token_ids, *tokenizer.encode("alpha"), IM_END]
    assert session.row.ids() == row
    await session.complete([U1, first.message, U2])
    second = engine.requests[1].token_ids
    assert list(second[: len(row)]) == row
    assert tokenizer.decode(second[len(row) :]) == "\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
    assert first.message.content == "alpha"
    assert (first.finish_reason, first.num_tokens) == (FinishReason.STOP, len(tokenizer.encode("alpha")) + 1)


async def test_what_was_sampled_is_kept_though_its_text_would_tokenize_otherwise(
    open_session: Open, engine: Any, tokenizer: ChatTokenizer, make_chunk: Callable[..., Any]
) -> None:
    odd = [tokenizer.token_id(letter) for letter in "the"]  # canonical: one token
    assert tokenizer.encode("the") != odd
    session = open_session()
    engine.replies = [[make_chunk([*odd, IM_END])], "ok"]
    answer = await session.complete([U1])
    assert answer.message.content == "the"
    await session.complete([U1, answer.message, U2])
    prompt = list(engine.requests[0].token_ids)
    assert list(engine.requests[1].token_ids[: len(prompt) + 4]) == [*prompt, *odd, IM_END]


async def test_chunks_become_spans_by_weight_version(
    open_session: Open, engine: Any, make_chunk: Callable[..., Any]
) -> None:
    session = open_session()
    engine.replies = [
        [
            make_chunk([9], version=3, finish=None),
            make_chunk([10, 11], version=3, finish=None),
            make_chunk([12], version=4, finish=None),
            make_chunk([IM_END], version=4),
        ]
    ]
    await session.complete([U1])
    start = len(engine.requests[0].token_ids)
    assert [(span.start - start, span.end - start, span.weight_version) for span in session.row.spans] == [
        (0, 3, 3),
        (3, 5, 4),
    ]


# --- what the engine is asked -----------------------------------------------------------------------------------------


async def test_max_tokens_ends_where_the_context_does(open_session: Open, engine: Any) -> None:
    session = open_session(context_length=40, max_tokens=1000)
    await session.complete([U1])
    request = engine.requests[0]
    assert request.params.max_tokens == 40 - len(request.token_ids)


async def test_stop_tokens_of_the_family_join_those_of_the_run(open_session: Open, engine: Any) -> None:
    session = open_session(stop_token_ids=(200,))
    await session.complete([U1])
    assert engine.requests[0].params.stop_token_ids == (IM_END, 200)


async def test_each_turn_derives_its_own_seed_and_a_retry_samples_anew(open_session: Open, engine: Any) -> None:
    session = open_session(seed=7)
    answer = await session.complete([U1])
    await session.complete([U1, answer.message, U2])
    await session.complete([U1, answer.message, U2])
    seeds = [request.params.seed for request in engine.requests]
    assert seeds == [turn_seed(7, 0), turn_seed(7, 1), turn_seed(7, 2)]
    assert len(set(seeds)) == 3
    assert turn_seed(None, 0) is None


async def test_a_failed_turn_is_repeated_with_the_same_seed(open_session: Open, engine: Any) -> None:
    session = open_session(seed=7)
    engine.replies = [EngineError("lost"), "ok"]
    with pytest.raises(EngineError):
        await session.complete([U1])
    await session.complete([U1])
    assert engine.requests[0].params.seed == engine.requests[1].params.seed


# --- ends -------------------------------------------------------------------------------------------------------------


async def test_a_turn_cut_off_by_length_cannot_be_extended_but_retried(
    open_session: Open, engine: Any, make_chunk: Callable[..., Any]
) -> None:
    session = open_session(max_tokens=2)
    engine.replies = [[make_chunk([9, 10], finish=FinishReason.LENGTH)], [make_chunk([IM_END])]]
    answer = await session.complete([U1])
    assert answer.finish_reason is FinishReason.LENGTH
    assert assemble(session, prompt_id="p").status is Status.TRUNCATED
    with pytest.raises(SessionError, match="cut off \\(finish reason length\\)"):
        await session.complete([U1, answer.message, U2])
    await session.complete([U1, U2])
    assert assemble(session, prompt_id="p").status is Status.COMPLETED


async def test_a_turn_ended_by_a_stop_string_is_not_given_a_stop_token(
    open_session: Open, engine: Any, make_chunk: Callable[..., Any]
) -> None:
    session = open_session(stop=("x",))
    engine.replies = [[make_chunk([9, 10])]]
    answer = await session.complete([U1])
    assert answer.finish_reason is FinishReason.STOP
    with pytest.raises(SessionError, match="has no end"):
        await session.complete([U1, answer.message, U2])


async def test_a_full_context_says_how_full_and_truncates(open_session: Open, engine: Any) -> None:
    session = open_session(context_length=45)
    answer = await session.complete([U1])
    row = session.row.ids()
    with pytest.raises(SessionError, match="context is full") as caught:
        await session.complete([U1, answer.message, Message(role="user", content="long " * 20)])
    assert "fewer than 45 tokens" in str(caught.value)
    assert session.row.ids() == row
    trajectory = assemble(session, prompt_id="p")
    assert trajectory.status is Status.TRUNCATED
    assert trajectory.failure is None


async def test_an_aborted_turn_keeps_its_tokens_and_its_status(
    open_session: Open, engine: Any, make_chunk: Callable[..., Any]
) -> None:
    session = open_session()
    engine.replies = [[make_chunk([9, 10], finish=None), make_chunk([], finish=FinishReason.ABORT)]]
    answer = await session.complete([U1])
    assert answer.finish_reason is FinishReason.ABORT
    trajectory = assemble(session, prompt_id="p")
    assert (trajectory.status, trajectory.response_tokens) == (Status.ABORTED, 2)


# --- concurrency ------------------------------------------------------------------------------------------------------


async def test_a_second_completion_is_refused_while_one_is_under_way(open_session: Open, engine: Any) -> None:
    session = open_session()
    engine.gate = asyncio.Event()
    running = asyncio.create_task(session.complete([U1]))
    await asyncio.sleep(0)
    with pytest.raises(SessionError, match="already generating"):
        await session.complete([U1])
    engine.gate.set()
    assert (await running).message.content == "ok"
    assert len(engine.requests) == 1


async def test_cancelling_aborts_the_request_and_leaves_the_session_as_it_was(open_session: Open, engine: Any) -> None:
    session = open_session()
    engine.gate = asyncio.Event()
    running = asyncio.create_task(session.complete([U1]))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert engine.closed_early == 1
    assert (len(session.row), session.messages, session.failure) == (0, (), None)
    engine.gate.set()
    await session.complete([U1])


async def test_a_session_closed_while_generating_drops_the_turn(open_session: Open, engine: Any) -> None:
    session = open_session()
    engine.gate = asyncio.Event()
    running = asyncio.create_task(session.complete([U1]))
    await asyncio.sleep(0)
    session.close()
    engine.gate.set()
    with pytest.raises(SessionError, match="was closed while"):
        await running
    assert len(session.row) == 0
    with pytest.raises(SessionError, match="session is closed"):
        await session.complete([U1])


async def test_a_commit_out_of_order_is_refused(open_session: Open, engine: Any) -> None:
    from miles_core.session.generation import Output

    session = open_session()
    prepared = session.prepare([U1])
    await session.complete([U1])
    with pytest.raises(SessionError, match="went on while"):
        session.commit(prepared, Output())


async def test_an_empty_history_is_refused(open_session: Open) -> None:
    with pytest.raises(SessionError, match="history is empty"):
        await open_session().complete([])


# --- families ---------------------------------------------------------------------------------------------------------


class OpenerFamily(DefaultFamily):
    """As GLM does it: the stop token is the opener of the next message and stands in the row once."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        super().__init__(None, tokenizer)
        self.stop_token_ids = frozenset({0, IM_END})

    def append(self, stored: Sequence[Message], appended: Sequence[Message], tools: Any = ()) -> list[int]:
        opener = IM_END if appended[0].role == "tool" else 0
        return [opener, *self.tokenizer.encode(appended[0].content), 1]

    def merge(self, prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        return [*prefix[:-1], *suffix]


async def test_a_stop_token_that_is_the_next_opener_stands_once_and_comes_back_on_rollback(
    open_session: Open, engine: Any, tokenizer: ChatTokenizer, make_chunk: Callable[..., Any]
) -> None:
    session = open_session(family=OpenerFamily(tokenizer))
    engine.replies = [[make_chunk([9, IM_END])], *([make_chunk([token, 0])] for token in (10, 11, 12))]
    first = await session.complete([U1])
    whole = session.row.ids()
    second = await session.complete([U1, first.message, U2])
    # IM_END was replaced by the opener 0: it is no longer in the row, and the row has no sampled token for it.
    prompt = list(engine.requests[1].token_ids)
    assert prompt[: len(whole)] == [*whole[:-1], 0]
    assemble(session, prompt_id="p").check()
    assert session.row.arrays()[1].sum() == 1 + 2
    # The retry starts from the first turn's own row, stop token included: here it stays, sampled as it was.
    tool = Message(role="tool", content="r")
    await session.complete([U1, first.message, tool])
    assert list(engine.requests[2].token_ids[: len(whole)]) == whole
    assert session.row.spans[0].end == len(whole)
    assemble(session, prompt_id="p").check()
    await session.complete([U1, first.message, U3])
    assert list(engine.requests[3].token_ids[: len(whole)]) == [*whole[:-1], 0]
    assert session.discarded_tokens == 2 * second.num_tokens
    # An opener equal to the sampled stop token stays the sampled one.
    third = session.messages[-1]
    await session.complete([U1, first.message, U3, third, U1])
    spans = session.row.spans
    assert session.row.ids()[spans[1].start : spans[1].end] == [12, 0]
    assemble(session, prompt_id="p").check()


class RewritingFamily(DefaultFamily):
    def merge(self, prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        text = self.tokenizer.decode(prefix)
        return super().merge(self.tokenizer.encode(text), suffix)


async def test_a_family_that_tokenizes_the_prefix_again_is_caught(
    open_session: Open, engine: Any, tokenizer: ChatTokenizer, make_chunk: Callable[..., Any]
) -> None:
    odd = [tokenizer.token_id(letter) for letter in "the"]
    session = open_session(family=RewritingFamily(None, tokenizer))
    engine.replies = [[make_chunk([*odd, IM_END])]]
    answer = await session.complete([U1])
    with pytest.raises(SessionError, match="changed tokens that were already") as caught:
        await session.complete([U1, answer.message, U2])
    assert "RewritingFamily" in str(caught.value)


# --- routes -----------------------------------------------------------------------------------------------------------


async def test_routes_recorded_first_stay_when_a_later_turn_recomputes_them(
    open_session: Open, engine: Any, make_chunk: Callable[..., Any]
) -> None:
    session = open_session(routes=True)
    first = len(session.prepare([U1]).prompt_ids) + 2
    engine.replies = [[make_chunk([9, IM_END], routes=np.full((first - 1, 2, 4), 1, np.int16))]]
    answer = await session.complete([U1])
    second = len(session.prepare([U1, answer.message, U2]).prompt_ids) + 2
    engine.replies = [[make_chunk([9, IM_END], routes=np.full((second - 1, 2, 4), 2, np.int16))]]
    await session.complete([U1, answer.message, U2])
    found = assemble(session, prompt_id="p").routes
    assert found is not None
    assert found.shape == (second - 1, 2, 4)
    assert (found[: first - 1] == 1).all()
    assert (found[first - 1 :] == 2).all()


async def test_a_turn_without_routes_leaves_its_rows_unrecorded(
    open_session: Open, engine: Any, make_chunk: Callable[..., Any]
) -> None:
    session = open_session(routes=True)
    first = len(session.prepare([U1]).prompt_ids) + 2
    engine.replies = [[make_chunk([9, IM_END], routes=np.full((first - 1, 2, 4), 1, np.int16))]]
    answer = await session.complete([U1])
    engine.replies = [[make_chunk([9], finish=FinishReason.ABORT)]]
    await session.complete([U1, answer.message, U2])
    found = assemble(session, prompt_id="p").routes
    assert found is not None
    assert found.shape[0] == len(session.row) - 1
    assert (found[: first - 1] == 1).all()
    assert (found[first - 1 :] == UNRECORDED).all()


async def test_routes_cover_the_row_of_the_latest_turn(
    open_session: Open, engine: Any, make_chunk: Callable[..., Any]
) -> None:
    session = open_session(routes=True)
    length = len(session.prepare([U1]).prompt_ids)
    routes = np.zeros((length + 1, 2, 4), np.int16)
    engine.replies = [[make_chunk([9, IM_END], routes=routes)], [make_chunk([9, IM_END], routes=routes)]]
    answer = await session.complete([U1])
    assert engine.requests[0].routes
    np.testing.assert_array_equal(assemble(session, prompt_id="p").routes, routes)
    with pytest.raises(EngineError, match="routes are on but do not cover the row"):
        await session.complete([U1, answer.message, U2])
