"""ScriptedSessions: sessions without an engine, whose answers a test writes down.

    sessions = ScriptedSessions(lambda turn: "4" if "2 + 2" in turn.messages[-1].content else "?")

Every byte of a text is one token, so that rows are readable. A turn takes a number of turns of the event loop, whatever
the clock says, so that sessions finish in the order that the script decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from miles_core.errors import EngineError, SessionError
from miles_core.kinds.environment import Completion
from miles_core.session.assembly import outcome
from miles_core.session.linear import LinearSession
from miles_core.types import (
    Boundary,
    Failure,
    FinishReason,
    Message,
    SamplingParams,
    TokenSpan,
    Tool,
    ToolCall,
    Trajectory,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request for an assistant message, as the script sees it."""

    session_id: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    turn: int
    """From 0 within the session."""
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the model says, and how long it takes."""

    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason = FinishReason.STOP
    ticks: int = 1
    """Times the event loop goes round before the answer."""
    error: Exception | None = None
    """Raised instead of answering."""
    hangs: bool = False
    """Never answers; ends by cancellation."""


Script = Callable[[Asked], Answer | str]


class ScriptedSessions:
    """A session factory over a script; remembers every session it opened."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.opened: list[ScriptedSession] = []

    def open(self, session_id: str, params: SamplingParams) -> ScriptedSession:
        session = ScriptedSession(session_id, params, self._script)
        self.opened.append(session)
        return session

    @property
    def left_open(self) -> list[str]:
        """Ids of the sessions nobody closed."""
        return [session.session_id for session in self.opened if not session.closed]


class ScriptedSession:
    def __init__(self, session_id: str, params: SamplingParams, script: Script) -> None:
        self.session_id = session_id
        self.params = params
        self.closed = False
        self.waiting = 0
        """Completions asked for and not answered yet; 0 when the session is at rest."""
        self.turns: list[Completion] = []
        self.failure: Failure | None = None
        self.overflow: SessionError | None = None
        self._script = script
        self._messages: tuple[Message, ...] = ()
        self._row: list[tuple[int, bool]] = []

    async def complete(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Completion:
        if self.closed:
            raise SessionError("the session is closed", where=self.session_id)
        if tuple(messages[: len(self._messages)]) != self._messages or len(messages) <= len(self._messages):
            raise SessionError("the history does not extend the stored one", where=self.session_id)
        if self.turns and self.turns[-1].finish_reason is not FinishReason.STOP:
            raise SessionError("the turn before was cut off and cannot be extended", where=self.session_id)
        asked = Asked(
            session_id=self.session_id,
            messages=tuple(messages),
            tools=tuple(tools),
            turn=len(self.turns),
            params=self.params,
        )
        answer = self._script(asked)
        answer = Answer(content=answer) if isinstance(answer, str) else answer
        self.waiting += 1
        try:
            for _ in range(answer.ticks):
                await asyncio.sleep(0)
            if answer.hangs:
                await asyncio.Event().wait()
        finally:
            self.waiting -= 1
        if isinstance(answer.error, EngineError):
            self.failure = Failure(boundary=Boundary.ENGINE, message=str(answer.error))
        if answer.error is not None:
            raise answer.error
        self.failure = None
        return self._record(asked, answer)

    def _record(self, asked: Asked, answer: Answer) -> Completion:
        message = Message(role="assistant", content=answer.content, tool_calls=answer.tool_calls)
        given = "".join(f"{message.role}:{message.content}\n" for message in asked.messages[len(self._messages) :])
        spoken = answer.content.encode() + b"\0"  # the stop token, which is sampled too
        self._row += [(byte, False) for byte in given.encode()] + [(byte, True) for byte in spoken]
        self._messages = (*asked.messages, message)
        completion = Completion(message=message, finish_reason=answer.finish_reason, num_tokens=len(spoken))
        self.turns.append(completion)
        return completion

    @property
    def messages(self) -> tuple[Message, ...]:
        """The whole conversation so far."""
        return self._messages

    def close(self) -> None:
        self.closed = True

    def trajectory(self, prompt_id: str, error: BaseException | None, metadata: Mapping[str, Any]) -> Trajectory:
        status, failure = outcome(cast(LinearSession, self), error)
        sampled = np.array([flag for _, flag in self._row], dtype=np.bool_)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], sampled, [False]]).astype(np.int8)))
        return Trajectory(
            prompt_id=prompt_id,
            session_id=self.session_id,
            token_ids=np.array([byte for byte, _ in self._row], dtype=np.int32),
            sampled=sampled,
            loss_mask=sampled.copy(),
            logprobs=np.where(sampled, np.float32(-0.5), np.float32(np.nan)).astype(np.float32),
            spans=tuple(TokenSpan(start=a, end=b, weight_version=0) for a, b in edges.reshape(-1, 2).tolist()),
            temperature=self.params.temperature,
            status=status,
            failure=failure,
            messages=self._messages,
            metadata={"turns": len(self.turns), **metadata},
        )


def assemble_scripted(
    session: ScriptedSession, *, prompt_id: str, error: BaseException | None, metadata: Mapping[str, Any]
) -> Trajectory:
    """`session.assembly.assemble` for a scripted session, with the same verdict on how the attempt ended."""
    return session.trajectory(prompt_id, error, metadata)
