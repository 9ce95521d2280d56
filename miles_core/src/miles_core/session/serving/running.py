"""Runs a turn for a client that may leave. If it does, the turn is cancelled and nothing is left behind.

The session changes only when the turn is complete, so it is consistent whenever a client leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from miles_core.kinds.environment import Completion
from miles_core.kinds.tito_family import Delta
from miles_core.session.base import Prepared, Session
from miles_core.session.refusals import SessionClosed


class TurnTask:
    """A turn that is being generated. It begins at once, so the session counts as busy from then on."""

    def __init__(self, session: Session, prepared: Prepared, *, listens: bool) -> None:
        self._session = session
        self._queue: asyncio.Queue[Delta | None] = asyncio.Queue()
        self._generation = prepared.generation
        session.reserved.add(prepared.generation)
        self.task = asyncio.create_task(session.run(prepared, self._queue.put_nowait if listens else None))
        self.task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Completion]) -> None:
        # Here and not in the coroutine: a task cancelled before its first step never runs a line of it.
        self._session.reserved.discard(self._generation)
        self._session.abandoned = task.cancelled()
        self._queue.put_nowait(None)

    async def result(self) -> Completion:
        """Wait for the turn's completion. Cancelling the wait cancels the turn.

        Raises:
            SessionClosed: the session was deleted meanwhile.
        """
        try:
            # Waited for, not awaited: being cancelled oneself and the task being cancelled by a deletion are two
            # things.
            await asyncio.wait([self.task])
        finally:
            self.task.cancel()
        if self.task.cancelled():
            raise SessionClosed(f"session {self._session.session_id!r} was deleted while its turn was generated")
        return self.task.result()

    async def pieces(self) -> AsyncGenerator[Delta | Completion, None]:
        """The pieces of the turn while they are sampled, then its completion. Closing this early cancels the turn.

        Raises:
            SessionClosed: the session was deleted meanwhile.
        """
        try:
            while (delta := await self._queue.get()) is not None:
                yield delta
            yield await self.result()
        finally:
            self.task.cancel()


class Running:
    """The turns of one session that clients wait for.

    When the session is deleted they are cancelled, so that the engine's slot is free at once.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Completion]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, session: Session, prepared: Prepared, *, listens: bool) -> TurnTask:
        turn = TurnTask(session, prepared, listens=listens)
        self._tasks.add(turn.task)
        turn.task.add_done_callback(self._tasks.discard)
        return turn

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


T = TypeVar("T")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled if the client leaves.

    Args:
        receive: The channel of the request, after its body was read.

    Raises:
        ClientGone: the client went away first.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
