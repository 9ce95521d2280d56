"""A linear session: one row of tokens that grows at its end, and becomes exactly one trajectory.

The latest turn may be tried again: if the agent sends a history without it, or with another answer in its place, that
turn is discarded and the row goes back to where it was. A history that differs earlier is refused.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from miles_core.errors import SessionError
from miles_core.routing.codec import Routes, extend, pad
from miles_core.session.base import Prepared, Session, SessionSetup, fixed_tools, same_tools, spell_tools
from miles_core.session.generation import Output
from miles_core.session.matching import difference, match_prefix
from miles_core.session.refusals import SessionBusy, StaleTurn, TurnCut
from miles_core.session.row import Tail, TokenIds, TokenRow
from miles_core.session.seam import join
from miles_core.types import FinishReason, Message, SamplingParams, Tool


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A committed turn of the assistant."""

    message_end: int
    """How many messages the history has with this turn's answer."""
    attached: int
    """How many tokens at the start of its prompt are those of the row before the turn."""
    dropped: Tail
    """What the prompt left out at the end of that row: at most a stop token that the next opener replaced."""
    row_end: int
    """Length of the row with this turn."""
    sampled: int
    """How many tokens were sampled; they are the last ones of the row."""
    finish_reason: FinishReason
    temperature: float
    generation: int
    """Number of the turn among all that the session sampled, discarded ones included."""


class LinearSession(Session):
    """See `base.Session`. A request is refused while another turn is being sampled."""

    def __init__(self, session_id: str, setup: SessionSetup) -> None:
        super().__init__(session_id, setup)
        self._row = TokenRow()
        self._messages: list[Message] = []
        self._accepted: list[Message] = []
        self._turns: list[Turn] = []
        self._call_turns: dict[str, int] = {}
        """The turn in which each tool-call id first appeared."""
        self._tools: tuple[Tool, ...] = ()
        self._generations = 0
        self.routes: Routes | None = None
        """Routes of the row. `routing.codec.extend` decides which turn's routes a position keeps."""
        self.discarded_turns = 0
        self.discarded_tokens = 0
        """Tokens that were sampled in discarded turns, and are not trained."""
        self.edited_turns = 0
        """Discarded turns that the agent replaced with an answer of its own."""

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

    @property
    def temperature(self) -> float:
        """The temperature at which the tokens were sampled; it is the same for the whole row."""
        return self._turns[-1].temperature if self._turns else self.params.temperature

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools of the latest turn."""
        return self._tools

    def row_to(self, turn: int) -> array[int]:
        """A copy of the row as it was after `turn`."""
        if turn + 1 == len(self._turns):
            return self._row.slice(0, len(self._row))
        later = self._turns[turn + 1]
        return self._row.slice(0, later.attached) + later.dropped.ids

    def sampled_of(self, turn: int) -> tuple[array[int], array[float]]:
        """Ids and log-probs of the tokens that were sampled in `turn`."""
        end = self._turns[turn].row_end
        start = end - self._turns[turn].sampled
        return self._row.slice(start, end), self._row.logprobs(start, end)

    def messages_to(self, turn: int) -> tuple[Message, ...]:
        """The conversation as it was after `turn`."""
        return tuple(self._messages[: self._turns[turn].message_end])

    # --- the turn -----------------------------------------------------------------------------------------------------

    def prepare(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, params: SamplingParams | None = None
    ) -> Prepared:
        self._check_open(messages)
        if self.in_flight or self.reserved:
            raise SessionBusy(
                "the session is already generating a turn",
                expected="one completion at a time: a linear session has one tail",
                where=self._where,
                do="await the first completion, open one session per branch, or serve session.history: branching",
            )
        matched = match_prefix(self._messages, messages, self._matcher, accepted=self._accepted)
        keep = self._turns_to_keep(messages, matched)
        discarded = self._turns[keep] if keep < len(self._turns) else None
        edited = discarded is not None and any(
            message.role == "assistant" for message in messages[discarded.message_end - 1 : discarded.message_end]
        )
        fixed = fixed_tools(tools)
        if keep == 0:
            fresh, shared = tuple(messages), 0
            prompt = array("i", self._family.render(fresh, fixed))
        else:
            self._check_extendable(keep, fixed)
            stored = self._messages[: self._turns[keep - 1].message_end]
            fresh = tuple(messages[len(stored) :])
            prompt = self.row_to(keep - 1)
            shared, new = join(
                self._family, prompt, self._family.append(stored, fresh, fixed), where=f"{self._where}, turn {keep}"
            )
            del prompt[shared:]
            prompt.extend(new)
        self._check_fits(prompt, len(self._turns))
        return Prepared(
            base=keep - 1,
            messages=fresh,
            tools=fixed,
            prompt_ids=TokenIds(prompt),
            shared=shared,
            edited=edited,
            generation=self._generations,
            params=self.params if params is None else params,
        )

    def _check_current(self, prepared: Prepared) -> None:
        if self._closed or prepared.generation != self._generations:
            why = "was closed" if self._closed else "went on"
            raise StaleTurn(
                f"the session {why} while its turn was generated; the turn is dropped",
                where=self._where,
            )

    def _apply(self, prepared: Prepared, output: Output, message: Message) -> int:
        self._roll_back(prepared)
        dropped = self._row.cut(prepared.shared)
        self._row.append_given(prepared.prompt_ids[prepared.shared :])
        self._row.append_output(output)
        fresh = (*prepared.messages, message)
        self._messages += fresh
        self._accepted += fresh
        turn = len(self._turns)
        for call in (call for each in fresh for call in each.tool_calls):
            self._call_turns.setdefault(call.id, turn)
        self._turns.append(
            Turn(
                message_end=len(self._messages),
                attached=prepared.shared,
                dropped=dropped,
                row_end=len(self._row),
                sampled=len(output.ids),
                finish_reason=output.finish_reason or FinishReason.ABORT,
                temperature=prepared.params.temperature,
                generation=prepared.generation,
            )
        )
        self._tools = prepared.tools
        self._generations += 1
        self.routes = self._extended_routes(prepared, output)
        return turn

    # --- private ------------------------------------------------------------------------------------------------------

    def _turns_to_keep(self, messages: Sequence[Message], matched: int) -> int:
        if matched == len(self._messages):
            return len(self._turns)
        keep = len(self._turns)
        while keep and self._turns[keep - 1].message_end > matched:
            keep -= 1
        if len(self._turns) - keep > 1:
            stored, replayed = difference(self._messages, messages, matched)
            raise SessionError(
                "the history diverges before the latest turn",
                expected=stored,
                found=replayed,
                where=f"{self._where}, which could roll back to message {self._turns[-2].message_end} at most",
                do="send the history as it was answered, or pick a looser session.matcher if only its spelling differs",
            )
        return keep

    def _check_extendable(self, keep: int, tools: tuple[Tool, ...]) -> None:
        reason = self._turns[keep - 1].finish_reason
        if reason is not FinishReason.STOP:
            raise TurnCut(
                f"the turn before was cut off (finish reason {reason.value}) and cannot be extended",
                expected="a turn that ended by itself",
                found=f"{self._turns[keep - 1].sampled} sampled tokens without a stop token",
                where=f"{self._where}, turn {keep - 1}",
                do="end the episode there, retry that turn, or raise sampling.max_tokens",
            )
        if not same_tools(tools, self._tools):
            raise SessionError(
                "the tools changed within the session; their tokens are already in the row",
                expected=spell_tools(self._tools),
                found=spell_tools(tools),
                where=self._where,
                do="pass the same tools with every turn, or open a new session",
            )

    def _roll_back(self, prepared: Prepared) -> None:
        keep = prepared.base + 1
        if keep == len(self._turns):
            return
        turn = self._turns.pop()
        self._row.cut(turn.attached)
        self._row.paste(turn.dropped)
        end = self._turns[-1].message_end if self._turns else 0
        del self._messages[end:], self._accepted[end:]
        self._call_turns = {call_id: at for call_id, at in self._call_turns.items() if at < keep}
        self.discarded_turns += 1
        self.discarded_tokens += turn.sampled
        self.edited_turns += prepared.edited

    def _extended_routes(self, prepared: Prepared, output: Output) -> Routes | None:
        """Routes of the row with this turn. The last of the shared tokens had no routes before: it was never an input
        of the engine."""
        length = len(prepared.prompt_ids) + len(output.ids)
        known = extend(self.routes, max(prepared.shared - 1, 0), output.routes)
        return None if known is None else pad(known, max(length - 1, 0))

    def _call_id_taken(self, prepared: Prepared, call_id: str) -> bool:
        if self._call_turns.get(call_id, len(self._turns)) <= prepared.base:
            return True
        return any(call.id == call_id for message in prepared.messages for call in message.tool_calls)
