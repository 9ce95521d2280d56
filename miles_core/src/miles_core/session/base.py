"""What linear and branching sessions share: how one turn is made, from the history that the agent sends.

    prepare   compare the history with the stored one, and turn what is new into tokens
    run       let the engine sample, and pass on pieces of the message while it does
    commit    append the prompt and the sampled tokens

Only `commit` changes the session: if the engine fails or the caller goes away, the session is as it was.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from miles_core.chat_template import plain
from miles_core.errors import EngineError, SessionError
from miles_core.kinds.engine import Engine, GenerateRequest
from miles_core.kinds.environment import Completion
from miles_core.kinds.matcher import Matcher
from miles_core.kinds.tito_family import Delta, TitoFamily
from miles_core.session.generation import Output, generate
from miles_core.session.refusals import ContextFull, SessionClosed
from miles_core.session.row import TokenIds
from miles_core.session.seeds import turn_seed
from miles_core.types import Boundary, Failure, FinishReason, Message, SamplingParams, Tool, ToolCall

OVERHEAD_BYTES = 1024
"""About what a message takes besides its text: its object, its turn, and its raw form in the server's transcript."""

Listener = Callable[[Delta], None]
"""Receives the pieces of a message while it is sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A turn that the session accepted and that was not sampled yet."""

    base: int
    """The turn that it follows, or -1 if the whole conversation was rendered."""
    messages: tuple[Message, ...]
    """The messages after that turn, without the answer."""
    tools: tuple[Tool, ...]
    prompt_ids: TokenIds
    shared: int
    """How many tokens at the start of the prompt are those of the stored row."""
    edited: bool = False
    """Whether the turn replaces one whose answer the agent rewrote, instead of asking for it again."""
    generation: int
    """Number of this turn among all that the session sampled; its seed depends on it."""
    params: SamplingParams
    """How to sample; limits and seed are added later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSetup:
    """What a session is opened with, apart from its name."""

    engine: Engine
    engine_name: str
    family: TitoFamily
    matcher: Matcher
    params: SamplingParams
    """How turns are sampled. `seed` is the session's, from which each turn derives its own."""
    context_length: int
    """The longest prompt plus output, in tokens."""
    routes: bool = False
    """Whether to ask the engine for the experts of every token."""
    on_close: Callable[[], None] | None = None
    """Called once, when the session is closed."""


class Session(ABC):
    """See `kinds.environment.SessionHandle`."""

    def __init__(self, session_id: str, setup: SessionSetup) -> None:
        self.session_id = session_id
        self.params = setup.params
        self.context_length = setup.context_length
        self._setup = setup
        self._family, self._matcher = setup.family, setup.matcher
        self._closed = False
        self.in_flight = 0
        """How many turns are being sampled."""
        self.reserved: set[int] = set()
        """Generations that a server has accepted and that may not have begun."""
        self.abandoned = False
        """Whether the client of the latest served turn went away before the turn was complete."""
        self.on_commit: Callable[[Prepared, Output], None] | None = None
        """Called with every turn before it is committed; if it raises, the turn is not committed."""
        self.failure: Failure | None = None
        """Why the latest engine call failed; None if it succeeded."""
        self.overflow: ContextFull | None = None
        """The error of the latest request, if it did not fit the context; None if it did."""
        self.cached_tokens = 0
        """Prompt tokens whose key-values the engine reused, over all turns."""
        self.size_bytes = 0
        """About how much memory rows and messages take; turns that were rolled back are still counted."""
        self.calls: dict[str, list[ToolCall]] = {}
        """The model's tool calls by id. In different branches several calls may have the same id."""

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def family(self) -> TitoFamily:
        return self._family

    async def complete(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Completion:
        """Sample the next assistant message.

        Raises:
            SessionError: the history diverges, the context is full, or another completion is under way.
            EngineError: the engine failed; the session is unchanged.
        """
        return await self.run(self.prepare(messages, tools))

    @abstractmethod
    def prepare(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, params: SamplingParams | None = None
    ) -> Prepared:
        """Make the next prompt from the history that the agent sends. Changes nothing in the session.

        Args:
            params: How to sample this turn; None is the session's way.

        Raises:
            SessionError: see `complete`.
        """

    async def run(self, prepared: Prepared, listener: Listener | None = None) -> Completion:
        """Sample a prepared turn and commit it. If it is cancelled, the session stays as it was.

        Args:
            listener: Receives the message in pieces while it is sampled.

        Raises:
            EngineError: the engine failed.
            StaleTurn: see `commit`.
        """
        read = None if listener is None else _Reader(self, prepared, listener)
        self.in_flight += 1
        try:
            output = await generate(
                self._setup.engine, self._request(prepared), engine_name=self._setup.engine_name, on_ids=read
            )
        except EngineError as error:
            self.failure = Failure(boundary=Boundary.ENGINE, message=str(error))
            raise
        finally:
            self.in_flight -= 1
        if read is not None:
            read.finish()
        return self.commit(prepared, output)

    def commit(self, prepared: Prepared, output: Output) -> Completion:
        """Append a sampled turn to the history: its prompt and its output become part of the row.

        Raises:
            StaleTurn: meanwhile the session was closed, or went on in a way that leaves no place for the turn.
        """
        self._check_current(prepared)
        parsed = self._family.parse(output.ids.tolist(), prepared.tools)
        calls = tuple(self._named(prepared, call) for call in parsed.tool_calls)
        message = replace(parsed, tool_calls=calls) if calls else parsed
        if self.on_commit is not None:
            self.on_commit(prepared, output)
        turn = self._apply(prepared, output, message)
        self.size_bytes += _size(prepared, output, message)
        for call in calls:
            self.calls.setdefault(call.id, []).append(call)
        self.cached_tokens += output.cached_tokens
        self.failure = self.overflow = None
        return Completion(
            message=message,
            finish_reason=output.finish_reason or FinishReason.ABORT,
            num_tokens=len(output.ids),
            prompt_tokens=len(prepared.prompt_ids),
            cached_tokens=output.cached_tokens,
            turn=turn,
        )

    def close(self) -> None:
        """Accept no further turn, and free the engine. The row can still be read. Closing twice is allowed."""
        if not self._closed:
            self._closed = True
            if self._setup.on_close is not None:
                self._setup.on_close()

    # --- for subclasses -----------------------------------------------------------------------------------------------

    @abstractmethod
    def _check_current(self, prepared: Prepared) -> None:
        """Raise `StaleTurn` if the history has no place for the turn any more."""

    @abstractmethod
    def _apply(self, prepared: Prepared, output: Output, message: Message) -> int:
        """Append the turn and return its number."""

    @abstractmethod
    def _call_id_taken(self, prepared: Prepared, call_id: str) -> bool:
        """Whether a message before the turn has a tool call with this id."""

    @property
    def _where(self) -> str:
        return f"session {self.session_id!r}"

    def _check_open(self, messages: Sequence[Message]) -> None:
        if self._closed:
            raise SessionClosed("the session is closed", where=self._where, do="open a new one")
        if not messages:
            raise SessionError("the history is empty", expected="at least one message", where=self._where)

    def _check_fits(self, prompt: Sequence[int], turns: int) -> None:
        if len(prompt) < self.context_length:
            return
        self.overflow = ContextFull(
            "the context is full: the prompt leaves no room for a single token",
            expected=f"fewer than {self.context_length} tokens",
            found=f"{len(prompt)} tokens after {turns} turn(s)",
            where=self._where,
            do="end the episode earlier, shorten what the environment appends, or raise model.context_length",
        )
        self.overflow.prompt_tokens = len(prompt)
        raise self.overflow

    # --- private ------------------------------------------------------------------------------------------------------

    def _request(self, prepared: Prepared) -> GenerateRequest:
        asked = prepared.params
        params = replace(
            asked,
            max_tokens=min(asked.max_tokens, self.context_length - len(prepared.prompt_ids)),
            stop_token_ids=tuple(sorted({*asked.stop_token_ids, *self._family.stop_token_ids})),
            seed=turn_seed(asked.seed, prepared.generation),
        )
        return GenerateRequest(
            request_id=f"{self.session_id}/{prepared.generation}",
            session_id=self.session_id,
            token_ids=prepared.prompt_ids,
            params=params,
            routes=self._setup.routes,
        )

    def _named(self, prepared: Prepared, call: ToolCall) -> ToolCall:
        """The call under an id that is new in the history. Families number the calls of each turn from the same start,
        but agents match results to calls by id over the whole history."""
        if not self._call_id_taken(prepared, call.id):
            return call
        return replace(call, id=f"{call.id}_turn{prepared.generation}")


class _Reader:
    """Parses ids while they are sampled, and gives tool calls the ids that they will have in the committed message."""

    def __init__(self, session: Session, prepared: Prepared, listener: Listener) -> None:
        self._session, self._prepared, self._listener = session, prepared, listener
        self._parser = session.family.stream_parser(prepared.tools)

    def __call__(self, ids: Sequence[int]) -> None:
        self._give(self._parser.feed(ids))

    def finish(self) -> None:
        self._give(self._parser.finish())

    def _give(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            calls = tuple(self._session._named(self._prepared, call) for call in delta.tool_calls)
            self._listener(replace(delta, tool_calls=calls) if calls else delta)


def _size(prepared: Prepared, output: Output, message: Message) -> int:
    tokens = len(prepared.prompt_ids) - prepared.shared + len(output.ids)
    routes = 0 if output.routes is None else int(output.routes.nbytes)
    texts = sum(
        len(each.content) + len(each.reasoning or "") + sum(len(call.arguments) for call in each.tool_calls)
        for each in (*prepared.messages, message)
    )
    return 8 * tokens + routes + texts + OVERHEAD_BYTES * (len(prepared.messages) + 1)


def fixed_tools(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """A copy of the tools as plain JSON values, which the caller cannot change."""
    return tuple(plain(tool) for tool in tools)


def same_tools(ours: Sequence[Tool], theirs: Sequence[Tool]) -> bool:
    """Whether both are equal as JSON; the order of keys does not count."""
    return tuple(ours) == tuple(theirs) or spell_tools(ours) == spell_tools(theirs)


def spell_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps(list(tools), sort_keys=True, ensure_ascii=False)
