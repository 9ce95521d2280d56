from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from miles_core.errors import EngineError, SessionError
from miles_core.session.assembly import assemble
from miles_core.session.linear import LinearSession
from miles_core.session.matching import MatcherError
from miles_core.types import Boundary, Message, Status

Open = Callable[..., LinearSession]
U1, U2 = Message(role="user", content="one"), Message(role="user", content="two")


async def test_the_trajectory_is_the_row_that_was_served(open_session: Open, engine: Any) -> None:
    session = open_session(temperature=0.7)
    engine.replies = ["alpha", "beta"]
    first = await session.complete([U1])
    second = await session.complete([U1, first.message, U2])
    row = assemble(session, prompt_id="p7", metadata={"tool_time_s": 1.5, "turns": 9})
    prompt = engine.requests[1].token_ids
    assert row.token_ids[: len(prompt)].tolist() == list(prompt)
    assert row.response_tokens == first.num_tokens + second.num_tokens
    assert (row.loss_mask == row.sampled).all()
    assert np.isnan(row.logprobs[~row.sampled]).all()
    assert (row.prompt_id, row.session_id, row.temperature) == ("p7", "s", 0.7)
    assert row.messages == (U1, first.message, U2, second.message)
    assert row.metadata["turn_tokens"] == [first.num_tokens, second.num_tokens]
    assert row.metadata["turns"] == 9  # what the environment reports wins
    assert (row.status, row.failure) == (Status.COMPLETED, None)


async def test_a_row_outlives_its_session(open_session: Open) -> None:
    session = open_session()
    await session.complete([U1])
    row = assemble(session, prompt_id="p")
    await session.complete([U2])
    session.close()
    row.check()
    assert row.messages[0] == U1


@pytest.mark.parametrize(
    ("error", "status", "boundary"),
    [
        (EngineError("x"), Status.FAILED, Boundary.ENGINE),
        (MatcherError("x"), Status.FAILED, Boundary.MATCHER),
        (SessionError("x"), Status.FAILED, Boundary.HARNESS),
        (ValueError("x"), Status.FAILED, Boundary.ENVIRONMENT),
        (TimeoutError(), Status.FAILED, Boundary.ENVIRONMENT),
        (asyncio.CancelledError(), Status.ABORTED, None),
    ],
)
async def test_what_the_environment_raised_decides_the_boundary(
    open_session: Open, error: BaseException, status: Status, boundary: Boundary | None
) -> None:
    session = open_session()
    await session.complete([U1])
    row = assemble(session, prompt_id="p", error=error)
    assert row.status is status
    assert (row.failure and row.failure.boundary) == boundary
    assert (row.failure is not None and row.failure.timed_out) == isinstance(error, TimeoutError)
    assert row.response_tokens > 0  # tokens are kept; failures are data


async def test_an_engine_failure_the_environment_swallowed_still_fails_the_engine(
    open_session: Open, engine: Any
) -> None:
    session = open_session()
    engine.replies = ["ok", EngineError("lost")]
    answer = await session.complete([U1])
    with pytest.raises(EngineError):
        await session.complete([U1, answer.message, U2])
    row = assemble(session, prompt_id="p")
    assert (row.status, row.failure and row.failure.boundary) == (Status.FAILED, Boundary.ENGINE)


def test_an_episode_that_never_asked_is_the_harness_failing(open_session: Open) -> None:
    row = assemble(open_session(), prompt_id="p")
    assert row.length == 0
    assert (row.status, row.failure and row.failure.boundary) == (Status.FAILED, Boundary.HARNESS)


async def test_a_prompt_that_never_fitted_is_the_environments_failure(open_session: Open) -> None:
    session = open_session(context_length=5)
    with pytest.raises(SessionError) as caught:
        await session.complete([U1])
    for error in (caught.value, None):
        row = assemble(session, prompt_id="p", error=error)
        assert (row.status, row.failure and row.failure.boundary) == (Status.FAILED, Boundary.ENVIRONMENT)
        assert "context is full" in str(row.failure)


async def test_a_context_filled_by_the_environment_truncates(open_session: Open) -> None:
    session = open_session(context_length=60)
    answer = await session.complete([U1])
    with pytest.raises(SessionError) as caught:
        await session.complete([U1, answer.message, Message(role="user", content="x" * 60)])
    for error in (caught.value, None):
        row = assemble(session, prompt_id="p", error=error)
        assert (row.status, row.failure) == (Status.TRUNCATED, None)


async def test_discarded_turns_are_counted_not_trained(open_session: Open, engine: Any) -> None:
    session = open_session()
    engine.replies = ["a long answer", "ok"]
    first = await session.complete([U1])
    await session.complete([U1])
    facts = assemble(session, prompt_id="p").metadata
    assert (facts["discarded_turns"], facts["discarded_tokens"]) == (1, first.num_tokens)
