"""From a session to a trajectory. The row is taken as it is, so training reads the very tokens that were sampled.

This is also the one place that decides how an attempt ended (`outcome`), from what the session knows and from what its
environment raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from miles_core.contracts.tokens import MISMATCH
from miles_core.errors import EngineError, SessionError
from miles_core.routing.codec import Routes, extend, pad
from miles_core.session.leaves import Leaf, Picker, drop_retries, owners, pick
from miles_core.session.linear import LinearSession, Turn
from miles_core.session.matching import MatcherError
from miles_core.session.mismatch import diagnose
from miles_core.session.row import TokenRow
from miles_core.session.tree import Node, TreeSession, leaf_spans
from miles_core.types import Bool, Boundary, Failure, FinishReason, Status, Tool, Trajectory
from miles_core.user_function import in_words

AnySession = LinearSession | TreeSession


def assemble_all(
    session: AnySession,
    *,
    prompt_id: str,
    error: BaseException | None = None,
    metadata: Mapping[str, Any] | None = None,
    picker: Picker = drop_retries,
) -> tuple[Trajectory, ...]:
    """All trajectories of a session: one of a linear session, one for each leaf that is kept of a branching one.

    Args:
        error, metadata: See `assemble`.
        picker: Chooses which leaves of a branching session are kept.

    Returns:
        At least one trajectory.

    Raises:
        ContractError: see `assemble`.
        PluginError: the picker failed.
    """
    if isinstance(session, LinearSession):
        return (assemble(session, prompt_id=prompt_id, error=error, metadata=metadata),)
    kept = pick(session, picker)
    if not kept:
        return (_empty(session, prompt_id, error, metadata),)
    owner = owners(kept)
    return tuple(_leaf(session, leaf, owner, len(kept), prompt_id, error, metadata) for leaf in kept)


def assemble(
    session: LinearSession,
    *,
    prompt_id: str,
    error: BaseException | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Trajectory:
    """The trajectory of a linear session, however it ended.

    Args:
        error: What the environment's `run` raised, if anything.
        metadata: JSON-compatible facts from the environment. They replace the session's facts of the same name.

    Returns:
        A trajectory that passes `Trajectory.check`. It has no tokens if no turn was committed.

    Raises:
        ContractError: the row breaks the tokens contract, which is a defect of this package.
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
        temperature=session.temperature,
        status=status,
        failure=failure,
        routes=session.routes,
        messages=session.messages,
        metadata={**_facts(session), **_linear_mismatch(session, sampled), **(metadata or {})},
    )
    trajectory.check()
    return trajectory


def assemble_attempt(
    session: AnySession,
    *,
    prompt_id: str,
    error: BaseException | None = None,
    metadata: Mapping[str, Any] | None = None,
    picker: Picker = drop_retries,
) -> Trajectory:
    """The session as one attempt: the first of its trajectories, with the others as its `branches`. See
    `assemble_all`."""
    first, *others = assemble_all(session, prompt_id=prompt_id, error=error, metadata=metadata, picker=picker)
    return replace(first, branches=tuple(others)) if others else first


def _leaf(
    session: TreeSession,
    leaf: Leaf,
    owner: Mapping[int, int],
    kept: int,
    prompt_id: str,
    error: BaseException | None,
    metadata: Mapping[str, Any] | None,
) -> Trajectory:
    path = session.path(leaf.node)
    row, routes = TokenRow(), None
    for node in path:
        row.cut(node.attached)
        row.paste(node.row.tail(shift=node.attached))
        routes = _extended(routes, node)
    ids, sampled, logprobs = row.arrays()
    trained = np.zeros(len(ids), dtype=np.bool_)
    for number, start, end in leaf_spans(path):
        trained[start:end] = owner[number] == leaf.node
    status, failure = outcome(session, error, last=path[-1])
    facts = {"leaf": leaf.node, "path": list(leaf.path), "leaves": kept, "node_count": len(session.nodes)}
    trajectory = Trajectory(
        prompt_id=prompt_id,
        session_id=session.session_id,
        token_ids=ids,
        sampled=sampled,
        loss_mask=trained & sampled,
        logprobs=logprobs,
        spans=row.spans,
        temperature=path[-1].temperature,
        status=status,
        failure=failure,
        routes=None if routes is None else pad(routes, max(len(ids) - 1, 0)),
        messages=session.messages_to(leaf.node),
        metadata={
            **_turn_facts(path),
            **facts,
            **_leaf_mismatch(session, path[-1], sampled),
            "cached_tokens": session.cached_tokens,
            **(metadata or {}),
        },
    )
    trajectory.check()
    return trajectory


def _extended(routes: Routes | None, node: Node) -> Routes | None:
    return extend(routes, max(node.attached - 1, 0), node.routes)


def _empty(
    session: TreeSession, prompt_id: str, error: BaseException | None, metadata: Mapping[str, Any] | None
) -> Trajectory:
    """The trajectory of a session without a turn: no tokens, and why."""
    status, failure = outcome(session, error)
    ids, sampled, logprobs = TokenRow().arrays()
    return Trajectory(
        prompt_id=prompt_id,
        session_id=session.session_id,
        token_ids=ids,
        sampled=sampled,
        loss_mask=sampled.copy(),
        logprobs=logprobs,
        spans=(),
        temperature=session.params.temperature,
        status=status,
        failure=failure,
        metadata={**_turn_facts(()), **(metadata or {})},
    )


def outcome(
    session: AnySession, error: BaseException | None = None, *, last: Turn | Node | None = None
) -> tuple[Status, Failure | None]:
    """How the attempt ended.

    Args:
        last: The turn that ends the row; None is the session's latest.

    An attempt is truncated if the context is full after some turns; if not even the first prompt fits, the environment
    failed. If the engine failed, the attempt failed there, even if the environment caught the error and ended. An
    attempt that was cancelled is aborted, not failed.
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
    return by_reason.get((last or session.turns[-1]).finish_reason, Status.COMPLETED), None


def session_unused(session: AnySession) -> Failure:
    """The failure of an episode that ended without a single completion."""
    if session.overflow is not None:
        return Failure(boundary=Boundary.ENVIRONMENT, message=str(session.overflow))
    return Failure(boundary=Boundary.HARNESS, message="the episode ended without asking the session for a completion")


def _raised(session: AnySession, error: BaseException) -> tuple[Status, Failure | None]:
    if session.overflow is not None and error is session.overflow and session.turns:
        return Status.TRUNCATED, None
    if isinstance(error, TimeoutError):
        message = str(error) or "the episode ran past its deadline"
        return Status.FAILED, Failure(boundary=Boundary.ENVIRONMENT, message=message, timed_out=True)
    return Status.FAILED, Failure(boundary=_boundary(session, error), message=in_words(error))


def _boundary(session: AnySession, error: BaseException) -> Boundary:
    if isinstance(error, EngineError):
        return Boundary.ENGINE
    if isinstance(error, MatcherError):
        return Boundary.MATCHER
    if isinstance(error, SessionError) and error is not session.overflow:
        return Boundary.HARNESS
    return Boundary.ENVIRONMENT


def _facts(session: LinearSession) -> dict[str, Any]:
    return {
        **_turn_facts(session.turns),
        "discarded_turns": session.discarded_turns,
        "discarded_tokens": session.discarded_tokens,
        "edited_turns": session.edited_turns,
        "cached_tokens": session.cached_tokens,
    }


def _turn_facts(turns: Sequence[Turn | Node]) -> dict[str, Any]:
    return {
        "turns": len(turns),
        "turn_tokens": [turn.sampled for turn in turns],
        "finish_reasons": [turn.finish_reason.value for turn in turns],
    }


def _linear_mismatch(session: LinearSession, sampled: Bool) -> dict[str, Any]:
    if not session.turns:
        return {}
    last, number = session.turns[-1], len(session.turns) - 1
    return _mismatch(session, number, last, sampled, session.tools)


def _leaf_mismatch(session: TreeSession, leaf: Node, sampled: Bool) -> dict[str, Any]:
    return _mismatch(session, leaf.number, leaf, sampled, leaf.tools)


def _mismatch(
    session: AnySession, number: int, last: Turn | Node, sampled: Bool, tools: Sequence[Tool]
) -> dict[str, Any]:
    found = diagnose(
        session.family,
        session.row_to(number),
        sampled,
        session.messages_to(number),
        tools,
        finish_reason=last.finish_reason,
        last_sampled=last.sampled,
    )
    return {MISMATCH: found}
