"""Every way an engine's answer can be no valid turn is the engine's failure, and the session stays as it was."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from miles_core.errors import EngineError
from miles_core.session.assembly import assemble
from miles_core.session.linear import LinearSession
from miles_core.testing.tiny import IM_END
from miles_core.types import Boundary, FinishReason, Message, Status

U1 = Message(role="user", content="one")
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def bad_answers(chunk: Callable[..., Any]) -> dict[str, list[Any]]:
    return {
        "give every sampled token its log-prob": [chunk([9, IM_END], logprobs=[-1.0])],
        "a log-prob is not one": [chunk([9, IM_END], logprobs=[-1.0, math.nan])],
        "at most 0": [chunk([9, IM_END], logprobs=[-1.0, 0.1])],
        "without a finish reason": [chunk([9], finish=None)],
        "after it had finished": [chunk([9, IM_END]), chunk([9])],
        "ran past the limit": [chunk([9] * 9, finish=LENGTH)],
        "sampled on after a stop token": [chunk([IM_END, 9, IM_END])],
        "returns no stop token": [chunk([9, 10])],
        "without a token": [chunk([], finish=LENGTH)],
    }


@pytest.mark.parametrize("says", bad_answers(lambda *_, **__: None))
async def test_an_invalid_answer_is_refused_and_attributed(
    open_session: Callable[..., LinearSession], engine: Any, make_chunk: Callable[..., Any], says: str
) -> None:
    session = open_session(max_tokens=8)
    engine.replies = [bad_answers(make_chunk)[says]]
    with pytest.raises(EngineError, match=says) as caught:
        await session.complete([U1])
    assert "engine 0, request s/0" in str(caught.value)
    assert (len(session.row), session.messages) == (0, ())
    trajectory = assemble(session, prompt_id="p", error=caught.value)
    assert trajectory.status is Status.FAILED
    assert trajectory.failure is not None
    assert trajectory.failure.boundary is Boundary.ENGINE


@pytest.mark.parametrize("raised", [RuntimeError("CUDA"), EngineError("closed"), TimeoutError("slow")])
async def test_whatever_an_engine_raises_is_an_engine_error(
    open_session: Callable[..., LinearSession], engine: Any, raised: Exception
) -> None:
    session = open_session()
    engine.replies = [raised]
    with pytest.raises(EngineError, match=str(raised)):
        await session.complete([U1])
    assert session.failure is not None
    assert session.failure.boundary is Boundary.ENGINE
    await session.complete([U1])
    assert session.failure is None
    assert assemble(session, prompt_id="p").status is Status.COMPLETED


async def test_a_stop_string_needs_no_stop_token(
    open_session: Callable[..., LinearSession], engine: Any, make_chunk: Callable[..., Any]
) -> None:
    session = open_session(stop=("x",))
    engine.replies = [[make_chunk([9, 10])]]
    assert (await session.complete([U1])).finish_reason is STOP
