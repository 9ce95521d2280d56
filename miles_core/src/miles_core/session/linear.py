"""A linear session: one token row, extended at the tail, owned here and shown to nobody but the engine.

    prepare   match the replayed history, tokenize what is new, merge at the seam     changes nothing
    generate  ask the engine                                                          holds nothing
    commit    roll back what was discarded, append prompt and sampled tokens          the only change

The latest turn may be retried: a history that agrees up to the checkpoint before it discards that one turn, and the row
goes back to where it was. Anything that diverges earlier is refused. Because nothing changes before `commit`, a failed
or cancelled engine call leaves the session as it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from miles_core.chat_template import plain
from miles_core.errors import EngineError, SessionError
from miles_core.kinds.engine import Engine, GenerateRequest
from miles_core.kinds.environment import Completion
from miles_core.kinds.matcher import Matcher
from miles_core.kinds.tito_family import TitoFamily
from miles_core.routing.codec import Routes, extend, pad
from miles_core.session.generation import Output, generate
from miles_core.session.matching import difference, match_prefix
from miles_core.session.row import Tail, TokenRow
from miles_core.session.seeds import turn_seed
from miles_core.types import Boundary, Failure, FinishReason, Message, SamplingParams, Tool


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A committed assistant turn: the checkpoint a later request extends or rolls back."""

    message_end: int
    """Stored messages up to and with the assistant's."""
    attached: int
    """Row length its prompt kept of the turn before."""
    dropped: Tail
    """What the merge took from the end of the turn before (a stop token that is the next opener)."""
    row_end: int
    sampled: int
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request the session accepted, ready for the engine; becomes history only through `commit`."""

    keep: int
    """Turns that stay; those after them are discarded at commit."""
    messages: tuple[Message, ...]
    """Messages after the kept turns, without the answer."""
    tools: tuple[Tool, ...]
    prompt_ids: tuple[int, ...]
    shared: int
    """Leading prompt tokens that are the stored row, unchanged."""
    edited: bool
    """The discarded turn was replaced by an assistant message the agent wrote, not retried."""
    generation: int
    """Number of the generation this becomes; a commit out of order is refused."""


class LinearSession:
    """See `kinds.environment.SessionHandle`.

    Args:
        context_length: Tokens of prompt plus output at most.
        params: How every turn samples; `seed` is the session's, each turn derives its own.
        routes: Ask the engine for the experts of every token.
        on_close: Called once, when the session is closed.
    """

    def __init__(
        self,
        session_id: str,
        *,
        engine: Engine,
        engine_name: str,
        family: TitoFamily,
        matcher: Matcher,
        params: SamplingParams,
        context_length: int,
        routes: bool = False,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.session_id = session_id
        self.params = params
        self.context_length = context_length
        self._engine, self._engine_name = engine, engine_name
        self._family, self._matcher = family, matcher
        self._want_routes = routes
        self._on_close = on_close
        self._stops = tuple(sorted({*params.stop_token_ids, *family.stop_token_ids}))
        self._row = TokenRow()
        self._messages: list[Message] = []
        self._turns: list[Turn] = []
        self._tools: tuple[Tool, ...] = ()
        self._generations = 0
        self._busy = self._closed = False
        self.routes: Routes | None = None
        """Of the row; `routing.codec.extend` says which turn's routes a position keeps."""
        self.failure: Failure | None = None
        """Why the latest engine call failed; None once a later one succeeds."""
        self.overflow: SessionError | None = None
        """The latest request did not fit the context; None once a later one did."""
        self.discarded_turns = 0
        self.discarded_tokens = 0
        """Sampled tokens that retries took out of the row: they were generated but are not trained."""
        self.edited_turns = 0
        """Discarded turns that the agent replaced by a message of its own instead of asking again."""
        self.cached_tokens = 0
        """Prompt tokens whose KV the engine reused, over all turns."""

    # --- views --------------------------------------------------------------------------------------------------------

    @property
    def row(self) -> TokenRow:
        return self._row

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(self._messages)

    @property
    def turns(self) -> tuple[Turn, ...]:
        return tuple(self._turns)

    # --- the turn -----------------------------------------------------------------------------------------------------

    async def complete(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Completion:
        """Sample the next assistant message.

        Raises:
            SessionError: the history diverges, the context is full, or another completion is under way.
            EngineError: the engine failed; the session is unchanged.
        """
        prepared = self.prepare(messages, tools)
        self._busy = True
        try:
            output = await generate(self._engine, self._request(prepared), engine_name=self._engine_name)
        except EngineError as error:
            self.failure = Failure(boundary=Boundary.ENGINE, message=str(error))
            raise
        finally:
            self._busy = False
        return self.commit(prepared, output)

    def prepare(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Prepared:
        """Turn a replayed history into the next prompt, without changing the session.

        Raises:
            SessionError: see `complete`.
        """
        self._check_open(messages)
        matched = match_prefix(self._messages, messages, self._matcher)
        keep = self._turns_to_keep(messages, matched)
        discarded = self._turns[keep] if keep < len(self._turns) else None
        edited = discarded is not None and any(
            message.role == "assistant" for message in messages[discarded.message_end - 1 : discarded.message_end]
        )
        fixed = tuple(plain(tool) for tool in tools)
        if keep == 0:
            fresh, shared = tuple(messages), 0
            prompt = self._family.render(fresh, fixed)
        else:
            self._check_extendable(keep, fixed)
            stored = self._messages[: self._turns[keep - 1].message_end]
            fresh = tuple(messages[len(stored) :])
            prefix = self._row_after(keep)
            prompt = self._family.merge(prefix, self._family.append(stored, fresh, fixed))
            shared = self._shared(prefix, prompt)
        self._check_fits(prompt)
        return Prepared(
            keep=keep,
            messages=fresh,
            tools=fixed,
            prompt_ids=tuple(prompt),
            shared=shared,
            edited=edited,
            generation=self._generations,
        )

    def commit(self, prepared: Prepared, output: Output) -> Completion:
        """Make a generated turn history: ``C = P || O``.

        Raises:
            SessionError: the session was closed, or another turn was committed since `prepare`.
        """
        if self._closed or prepared.generation != self._generations:
            why = "was closed" if self._closed else "went on"
            raise SessionError(
                f"the session {why} while its turn was generated; the turn is dropped",
                where=f"session {self.session_id!r}",
            )
        self._roll_back(prepared)
        dropped = self._row.cut(prepared.shared)
        self._row.append_given(prepared.prompt_ids[prepared.shared :])
        at = 0
        for count, version in output.stretches:
            self._row.append_sampled(output.ids[at : at + count], output.logprobs[at : at + count], version)
            at += count
        message = self._unique_call_ids(self._family.parse(output.ids.tolist(), prepared.tools))
        self._messages += [*prepared.messages, message]
        reason = output.finish_reason or FinishReason.ABORT
        self._turns.append(
            Turn(
                message_end=len(self._messages),
                attached=prepared.shared,
                dropped=dropped,
                row_end=len(self._row),
                sampled=at,
                finish_reason=reason,
            )
        )
        self._tools = prepared.tools
        self._generations += 1
        self.routes = self._extended_routes(prepared, output)
        self.cached_tokens += output.cached_tokens
        self.failure = self.overflow = None
        return Completion(message=message, finish_reason=reason, num_tokens=at)

    def close(self) -> None:
        """Give the engine's slot back. The row stays readable; no further turn is accepted. Idempotent."""
        if not self._closed:
            self._closed = True
            if self._on_close is not None:
                self._on_close()

    # --- private ------------------------------------------------------------------------------------------------------

    def _request(self, prepared: Prepared) -> GenerateRequest:
        params = replace(
            self.params,
            max_tokens=min(self.params.max_tokens, self.context_length - len(prepared.prompt_ids)),
            stop_token_ids=self._stops,
            seed=turn_seed(self.params.seed, self._generations),
        )
        return GenerateRequest(
            request_id=f"{self.session_id}/{self._generations}",
            session_id=self.session_id,
            token_ids=prepared.prompt_ids,
            params=params,
            routes=self._want_routes,
        )

    def _check_open(self, messages: Sequence[Message]) -> None:
        where = f"session {self.session_id!r}"
        if self._closed:
            raise SessionError("the session is closed", where=where, do="open a new one")
        if self._busy:
            raise SessionError(
                "the session is already generating a turn",
                expected="one completion at a time: a linear session has one tail",
                where=where,
                do="await the first completion, or open one session per branch",
            )
        if not messages:
            raise SessionError("the history is empty", expected="at least one message", where=where)

    def _turns_to_keep(self, messages: Sequence[Message], matched: int) -> int:
        if matched == len(self._messages):
            return len(self._turns)
        keep = sum(turn.message_end <= matched for turn in self._turns)
        if len(self._turns) - keep > 1:
            stored, replayed = difference(self._messages, messages, matched)
            raise SessionError(
                "the history diverges before the latest turn",
                expected=stored,
                found=replayed,
                where=f"session {self.session_id!r}, which could roll back to message "
                f"{self._turns[-2].message_end} at most",
                do="send the history as it was answered, or pick a looser session.matcher if only its spelling differs",
            )
        return keep

    def _check_extendable(self, keep: int, tools: tuple[Tool, ...]) -> None:
        reason = self._turns[keep - 1].finish_reason
        if reason is not FinishReason.STOP:
            raise SessionError(
                f"the turn before was cut off (finish reason {reason.value}) and cannot be extended",
                expected="a turn that ended by itself",
                found=f"{self._turns[keep - 1].sampled} sampled tokens without a stop token",
                where=f"session {self.session_id!r}, turn {keep - 1}",
                do="end the episode there, retry that turn, or raise sampling.max_tokens",
            )
        if _spelling(tools) != _spelling(self._tools):
            raise SessionError(
                "the tools changed within the session; their tokens are already in the row",
                expected=_spelling(self._tools),
                found=_spelling(tools),
                where=f"session {self.session_id!r}",
                do="pass the same tools with every turn, or open a new session",
            )

    def _row_after(self, keep: int) -> list[int]:
        """Ids of the row as it was committed with turn ``keep - 1``."""
        if keep == len(self._turns):
            return self._row.ids()
        later = self._turns[keep]
        return self._row.ids(later.attached) + later.dropped.ids.tolist()

    def _shared(self, prefix: list[int], prompt: list[int]) -> int:
        """Length of the stored prefix in `prompt`: all, or all but a final stop token that the next opener replaces."""
        if prompt[: len(prefix)] == prefix:
            return len(prefix)
        short = len(prefix) - 1
        if prefix[-1] in self._family.stop_token_ids and prompt[:short] == prefix[:short]:
            return short
        pairs = enumerate(zip(prefix, prompt, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(prefix), len(prompt)))
        raise SessionError(
            "the token family changed tokens that were already rendered or sampled",
            expected=f"{prefix[max(0, at - 2) : at + 6]} from token {max(0, at - 2)}",
            found=f"{prompt[max(0, at - 2) : at + 6]}",
            where=f"family {type(self._family).__name__}, session {self.session_id!r}",
            do="report it to the family's author; its `merge` may only touch the seam",
        )

    def _check_fits(self, prompt: Sequence[int]) -> None:
        if len(prompt) < self.context_length:
            return
        self.overflow = SessionError(
            "the context is full: the prompt leaves no room for a single token",
            expected=f"fewer than {self.context_length} tokens",
            found=f"{len(prompt)} tokens after {len(self._turns)} turn(s)",
            where=f"session {self.session_id!r}",
            do="end the episode earlier, shorten what the environment appends, or raise model.context_length",
        )
        raise self.overflow

    def _roll_back(self, prepared: Prepared) -> None:
        if prepared.keep == len(self._turns):
            return
        turn = self._turns.pop()
        self._row.cut(turn.attached)
        self._row.paste(turn.dropped)
        del self._messages[self._turns[-1].message_end if self._turns else 0 :]
        self.discarded_turns += 1
        self.discarded_tokens += turn.sampled
        self.edited_turns += prepared.edited

    def _extended_routes(self, prepared: Prepared, output: Output) -> Routes | None:
        """Routes of the row with this turn: of the tokens it shares with the row before, the last one was never an
        input there."""
        length = len(prepared.prompt_ids) + len(output.ids)
        known = extend(self.routes, max(prepared.shared - 1, 0), output.routes)
        return None if known is None else pad(known, max(length - 1, 0))

    def _unique_call_ids(self, message: Message) -> Message:
        """Families number calls within a turn; agents file results by call id over the whole history."""
        taken = {call.id for stored in self._messages for call in stored.tool_calls}
        if not any(call.id in taken for call in message.tool_calls):
            return message
        suffix = f"_turn{self._generations}"
        return replace(message, tool_calls=tuple(replace(call, id=call.id + suffix) for call in message.tool_calls))


def _spelling(tools: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps(list(tools), sort_keys=True, ensure_ascii=False)
