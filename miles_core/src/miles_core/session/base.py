"""What linear and branching sessions share: a turn, from the replayed history to the assistant's message.

    prepare   match the replayed history, tokenize what is new, merge at the seam     changes nothing
    run       ask the engine, let the caller read along                               holds nothing
    commit    append prompt and sampled tokens                                        the only change

Because nothing changes before `commit`, a failed, cancelled or abandoned engine call leaves the session as it was.
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
"""Of a message: its object, its turn, and its raw form in the server's transcript."""

Listener = Callable[[Delta], None]
"""Reads a turn along while it is sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request the session accepted, ready for the engine; becomes history only through `commit`."""

    base: int
    """The turn it extends, or -1: everything was rendered anew."""
    messages: tuple[Message, ...]
    """Messages after that turn, without the answer."""
    tools: tuple[Tool, ...]
    prompt_ids: TokenIds
    shared: int
    """Leading prompt tokens that are the stored row, unchanged."""
    edited: bool = False
    """A discarded turn was replaced by an assistant message the agent wrote, not retried."""
    generation: int
    """Number of the generation this becomes; seeds its sampling."""
    params: SamplingParams
    """How this turn samples, before limits and seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSetup:
    """What a session is opened with; everything but its name."""

    engine: Engine
    engine_name: str
    family: TitoFamily
    matcher: Matcher
    params: SamplingParams
    """How turns sample; `seed` is the session's, each turn derives its own."""
    context_length: int
    """Tokens of prompt plus output at most."""
    routes: bool = False
    """Ask the engine for the experts of every token."""
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
        """Turns under way."""
        self.reserved: set[int] = set()
        """Generations that somebody has set about and that may not have begun."""
        self.abandoned = False
        """The latest served turn was given up by whoever waited for it."""
        self.on_commit: Callable[[Prepared, Output], None] | None = None
        """Called with every turn before it becomes history; if it raises, the turn does not."""
        self.failure: Failure | None = None
        """Why the latest engine call failed; None once a later one succeeds."""
        self.overflow: ContextFull | None = None
        """The latest request did not fit the context; None once a later one did."""
        self.cached_tokens = 0
        """Prompt tokens whose KV the engine reused, over all turns."""
        self.size_bytes = 0
        """Memory of rows and messages, about; turns that were rolled back count on."""
        self.calls: dict[str, list[ToolCall]] = {}
        """Tool calls the model made, by id; branches may use one id several times."""

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
        """Turn a replayed history into the next prompt, without changing the session.

        Args:
            params: How this turn samples; None is as the session does.

        Raises:
            SessionError: see `complete`.
        """

    async def run(self, prepared: Prepared, listener: Listener | None = None) -> Completion:
        """Sample a prepared turn and commit it. Cancelling aborts the request and leaves the session as it was.

        Args:
            listener: Gets the message piece by piece while it is sampled; joined, the pieces are the message.

        Raises:
            EngineError: the engine failed.
            StaleTurn: the session went on or was closed meanwhile.
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
        """Make a generated turn history: ``C = P || O``.

        Raises:
            StaleTurn: the session was closed, or went on in a way that leaves no place for the turn.
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
        """Give the engine's slot back. The row stays readable; no further turn is accepted. Idempotent."""
        if not self._closed:
            self._closed = True
            if self._setup.on_close is not None:
                self._setup.on_close()

    # --- for subclasses -----------------------------------------------------------------------------------------------

    @abstractmethod
    def _check_current(self, prepared: Prepared) -> None:
        """Raise `StaleTurn` if the turn has no place in the history any more."""

    @abstractmethod
    def _apply(self, prepared: Prepared, output: Output, message: Message) -> int:
        """Append the turn and return its number."""

    @abstractmethod
    def _call_id_taken(self, prepared: Prepared, call_id: str) -> bool:
        """Whether a message before the turn has a tool call of this id."""

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
        """Families number calls within a turn; agents file results by call id over the whole history."""
        if not self._call_id_taken(prepared, call.id):
            return call
        return replace(call, id=f"{call.id}_turn{prepared.generation}")


class _Reader:
    """Turns sampled ids into deltas under the call ids that the committed message will have."""

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
    """The tools as plain JSON values of their own."""
    return tuple(plain(tool) for tool in tools)


def same_tools(ours: Sequence[Tool], theirs: Sequence[Tool]) -> bool:
    """Whether both render alike; the order of keys does not count."""
    return tuple(ours) == tuple(theirs) or spell_tools(ours) == spell_tools(theirs)


def spell_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps(list(tools), sort_keys=True, ensure_ascii=False)
