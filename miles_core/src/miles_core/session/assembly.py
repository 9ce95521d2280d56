"""Session to trajectory: the row that serving built is the row that training reads; nothing is tokenized again.

Also the one place that says how an attempt ended: what a session knows and what its environment raised become a
status and, where something failed, the boundary at which it did.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from miles_core.errors import EngineError, SessionError
from miles_core.session.linear import LinearSession
from miles_core.session.matching import MatcherError
from miles_core.types import Boundary, Failure, FinishReason, Status, Trajectory


def assemble(
    session: LinearSession,
    *,
    prompt_id: str,
    error: BaseException | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Trajectory:
    """The session's one trajectory, whatever happened to it.

    Args:
        error: What the environment's `run` raised, if it did; decides the status with the session, see `outcome`.
        metadata: JSON-compatible facts from the environment; wins over the session's own of the same name.

    Returns:
        A trajectory that passes `Trajectory.check`. Without a committed turn it has no tokens.

    Raises:
        ContractError: the session built a row that breaks the tokens contract (a defect of this package).
    """
    ids, sampled, logprobs = session.row.arrays()
    status, failure = outcome(session, error)
    trajectory = Trajectory(
        prompt_id=prompt_id,
        session_id=session.session_id,
        token_ids=ids,
        sampled=sampled,
        loss_mask=sampled.copy(),
        logprobs=logprobs,
        spans=session.row.spans,
        temperature=session.params.temperature,
        status=status,
        failure=failure,
        routes=session.routes,
        messages=session.messages,
        metadata={**_facts(session), **(metadata or {})},
    )
    trajectory.check()
    return trajectory


def outcome(session: LinearSession, error: BaseException | None = None) -> tuple[Status, Failure | None]:
    """How the attempt ended.

    A full context truncates a session that has turns; a first prompt that does not fit is the environment's failure.
    An engine error counts as the engine's even if the environment caught it and gave up. Cancellation is an abort,
    not a failure.
    """
    if isinstance(error, asyncio.CancelledError):
        return Status.ABORTED, None
    if error is not None:
        return _raised(session, error)
    if session.failure is not None:
        return Status.FAILED, session.failure
    if not session.turns:
        return Status.FAILED, session_unused(session)
    if session.overflow is not None:
        return Status.TRUNCATED, None
    by_reason = {FinishReason.LENGTH: Status.TRUNCATED, FinishReason.ABORT: Status.ABORTED}
    return by_reason.get(session.turns[-1].finish_reason, Status.COMPLETED), None


def session_unused(session: LinearSession) -> Failure:
    """The failure of an episode that ended without a single completion."""
    if session.overflow is not None:
        return Failure(boundary=Boundary.ENVIRONMENT, message=str(session.overflow))
    return Failure(boundary=Boundary.HARNESS, message="the episode ended without asking the session for a completion")


def _raised(session: LinearSession, error: BaseException) -> tuple[Status, Failure | None]:
    if session.overflow is not None and error is session.overflow and session.turns:
        return Status.TRUNCATED, None
    if isinstance(error, TimeoutError):
        message = str(error) or "the episode ran past its deadline"
        return Status.FAILED, Failure(boundary=Boundary.ENVIRONMENT, message=message, timed_out=True)
    return Status.FAILED, Failure(boundary=_boundary(session, error), message=f"{type(error).__name__}: {error}")


def _boundary(session: LinearSession, error: BaseException) -> Boundary:
    if isinstance(error, EngineError):
        return Boundary.ENGINE
    if isinstance(error, MatcherError):
        return Boundary.MATCHER
    if isinstance(error, SessionError) and error is not session.overflow:
        return Boundary.HARNESS
    return Boundary.ENVIRONMENT


def _facts(session: LinearSession) -> dict[str, Any]:
    return {
        "turns": len(session.turns),
        "turn_tokens": [turn.sampled for turn in session.turns],
        "finish_reasons": [turn.finish_reason.value for turn in session.turns],
        "discarded_turns": session.discarded_turns,
        "discarded_tokens": session.discarded_tokens,
        "edited_turns": session.edited_turns,
        "cached_tokens": session.cached_tokens,
    }
