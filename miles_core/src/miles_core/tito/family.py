"""The declarative base of token families: what a family says about its rows, and the code that all share.

A family is mostly data: how each role is wrapped, what closes an assistant turn, which tokens stop it, what stands
between turns that the model never samples, how it thinks and calls. The rows are written here, in Python and not
through the checkpoint's template, because a template may rewrite what was said before; `claims` compares the two.

    row     = preamble · turns · opener
    turn    = wrapped text                    user, system, a group of tool results
            | opener · said · end · seam      assistant; `said` is what the model would have sampled

Because an assistant turn in a history is its opener followed by what was sampled, a row built turn by turn is the row
rendered at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Self, TypeVar

from miles_core.errors import BranchNeeded, DataError, SessionError
from miles_core.kinds.tito_family import StreamParser, joined
from miles_core.tito.formats import CallFormat
from miles_core.tito.options import EarlierReasoning, FamilyOptions
from miles_core.tito.parser import ReplyParser, ReplyText, Thoughts
from miles_core.tito.probes import PROBES, same_text
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Message, Tool

Options = TypeVar("Options", bound=FamilyOptions)


@dataclass(frozen=True, slots=True)
class Wrap:
    """Text around something."""

    before: str
    after: str

    def __call__(self, text: str) -> str:
        return self.before + text + self.after


class DeclaredFamily(Generic[Options]):
    """See `kinds.tito_family.TitoFamily`. Subclasses set the class variables and override what is not data.

    Args:

    Raises:
        DataError: the tokenizer lacks one of the family's control tokens.
    """

    control_tokens: ClassVar[tuple[str, ...]]
    """Tokens the tokenizer must hold, special or added."""
    stops: ClassVar[tuple[str, ...]]
    """Tokens that end an assistant turn; those the tokenizer lacks are left out."""
    end: ClassVar[str]
    """What closes an assistant turn in a row; empty where the next opener does."""
    seam: ClassVar[str] = ""
    """What the row holds between `end` and the next turn; the model never samples it."""
    replaced_stops: ClassVar[tuple[str, ...]] = ()
    """Stop tokens that give way to `end` when the conversation goes on: one that is also the next opener, or one
    that only ever stands last."""
    kept_stops: ClassVar[tuple[str, ...]] = ()
    """Further stop tokens that close a turn as well as `end` does."""
    header: ClassVar[str]
    """What opens an assistant turn, without anything of its reasoning."""
    user: ClassVar[Wrap]
    system: ClassVar[Wrap | None] = None
    """How a system message in the middle is written; None refuses it there."""
    tool: ClassVar[Wrap]
    tool_group: ClassVar[Wrap] = Wrap("", "")
    """Around consecutive tool results."""
    thoughts: ClassVar[Thoughts | None] = None
    calls: ClassVar[CallFormat | None] = None
    deliberate: ClassVar[Mapping[str, str]] = {}
    """Probes (`tito.probes.PROBES`) on which the row differs from the published template, and why."""

    def __init__(self, options: Options, tokenizer: ChatTokenizer) -> None:
        self.options = options
        self.tokenizer = tokenizer
        for token in self.control_tokens:
            self._control(token)
        ids = (tokenizer.token_id(token) for token in self.stops)
        self.stop_token_ids = frozenset(index for index in ids if index is not None)
        self._end = tokenizer.encode(self.end)
        self._seam = tokenizer.encode(self.seam)
        replaced = (tokenizer.token_id(token) for token in self.replaced_stops)
        self._replaced = frozenset(index for index in replaced if index is not None)
        kept = (tokenizer.token_id(token) for token in self.kept_stops)
        self._kept = frozenset(index for index in kept if index is not None)

    @classmethod
    def claims(cls, tokenizer: ChatTokenizer) -> bool:
        """Whether the checkpoint's template writes what the family writes, on every probe it does not deliberately
        write in another way."""
        try:
            family = cls.for_checkpoint(tokenizer)
        except DataError:
            return False
        return all(same_text(family, probe) for name, probe in PROBES.items() if name not in cls.deliberate)

    @classmethod
    def for_checkpoint(cls, tokenizer: ChatTokenizer) -> Self:
        """The family with default options.

        Raises:
            DataError: the tokenizer lacks one of the family's control tokens.
        """
        raise NotImplementedError

    # --- rows ---------------------------------------------------------------------------------------------------------

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        return self.tokenizer.encode(self.text(messages, tools))

    def append(self, stored: Sequence[Message], appended: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """See `kinds.tito_family.TitoFamily.append`.

        Raises:
            BranchNeeded: the option `earlier_reasoning` is `branch` and these messages make the template forget
                reasoning that is in the row.
        """
        self._check_appendable(appended)
        self._check_memory(stored, appended)
        return self.tokenizer.encode(self.turns(appended, before=stored[-1]) + self.opener(appended[-1]))

    def text(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, opener: bool = True) -> str:
        """A whole conversation as text.

        Args:
            opener: Whether the next assistant turn is opened.
        """
        head, rest = self.preamble(messages, tools)
        self._check_appendable(rest)
        forgotten = 0
        if self.earlier_reasoning() == "branch":
            forgotten = max(0, self.forgets_before(messages) - (len(messages) - len(rest)))
        written = self.turns(rest, before=None, forgotten=forgotten)
        return head + written + (self.opener(messages[-1]) if opener else "")

    def merge(self, prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        """See `kinds.tito_family.TitoFamily.merge`."""
        row, end, seam = list(prefix), self._end, self._seam
        closing = [*end, *seam]
        if row and row[-1] in self._replaced:
            return [*row[:-1], *closing, *suffix]
        if (row and row[-1] in self._kept) or (end and row[-len(end) :] == end):
            return [*row, *seam, *suffix]
        if end and row[-len(closing) :] == closing:
            return [*row, *suffix]
        if self.options.open_turn == "close":
            return [*row, *closing, *suffix]
        raise SessionError(
            "the last turn has no end, and a stop token that was not sampled is not made up",
            expected=f"{self.end or ' or '.join(self.replaced_stops)} at the end of the row",
            found=f"{[self.tokenizer.token(index) for index in row[-4:]]}",
            where=self.tokenizer.where,
            do="end the episode there, or set the family's option open_turn: close",
        )

    # --- replies ------------------------------------------------------------------------------------------------------

    def spell(self, message: Message, after: Message | None = None) -> str:
        """See `kinds.tito_family.TitoFamily.spell`."""
        header = self.header_after(after)
        return self.said(message, after).removeprefix(self.opener(after).removeprefix(header))

    def parse(self, output_ids: Sequence[int], tools: Sequence[Tool] = ()) -> Message:
        parser = self.stream_parser(tools)
        return joined([*parser.feed(output_ids), *parser.finish()])

    def stream_parser(self, tools: Sequence[Tool] = ()) -> StreamParser:
        opened = self.thoughts is not None and self.prefill().rstrip() == self.thoughts.opening
        text = ReplyText(thoughts=self.thoughts, opened=opened, lead=self.lead(), calls=self.calls, tools=tools)
        return ReplyParser(text, self.tokenizer, self.stop_token_ids)

    # --- what a family may override -----------------------------------------------------------------------------------

    def preamble(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[str, Sequence[Message]]:
        """What stands before the first turn, and the messages that it does not hold."""
        raise NotImplementedError

    def template_variables(self) -> Mapping[str, object]:
        """What the checkpoint's template is given to write what the family writes."""
        return {}

    def earlier_reasoning(self) -> EarlierReasoning:
        """What becomes of reasoning that the published template would leave out of later rows."""
        return "keep"

    def opener(self, after: Message | None) -> str:
        """What opens an assistant turn behind the message `after`."""
        return self.header + self.prefill()

    def prefill(self) -> str:
        """The beginning of every reply that the opener already holds: an opening tag, an empty thought, nothing."""
        return ""

    def lead(self) -> str:
        """White space between an opener that holds a whole thought and the content."""
        return ""

    @property
    def reasons(self) -> bool:
        """Whether the model writes reasoning with these options."""
        return self.thoughts is not None

    def said(self, message: Message, after: Message | None, *, forgotten: bool = False) -> str:
        """What the model would have sampled, and the opener's prefill: reasoning, content, calls; not the end."""
        return self.thought(message, forgotten=forgotten) + message.content + self.called(message)

    def thought(self, message: Message, *, forgotten: bool = False) -> str:
        """The reasoning with its tags, or what stands for none. Begins with `prefill`.

        Args:
            forgotten: Write what the published template leaves of it in an earlier turn.
        """
        if self.thoughts is None or message.reasoning is None:
            return ""
        return self.thoughts.write(message.reasoning)

    def called(self, message: Message) -> str:
        """The tool calls with the white space before them."""
        if not message.tool_calls:
            return ""
        if self.calls is None:
            raise self._refused("tool calls", "a conversation without them", "pick a family that spells tool calls")
        return self.calls.write(message.tool_calls, content=bool(message.content))

    def tool_result(self, message: Message, call: Message | None) -> str:
        """One tool result.

        Args:
            call: The assistant message whose calls are answered, where it is known.
        """
        return self.tool(message.content)

    def turns(self, messages: Sequence[Message], *, before: Message | None, forgotten: int = 0) -> str:
        """Messages one after the other.

        Args:
            before: The message that stands before them, or None at the beginning of a conversation.
            forgotten: Number of leading messages whose reasoning is forgotten.
        """
        parts, previous = [], before
        calling = before if before is not None and before.role == "assistant" else None
        for index, message in enumerate(messages):
            following = messages[index + 1] if index + 1 < len(messages) else None
            if message.role == "assistant":
                parts.append(self.assistant(message, previous, forgotten=index < forgotten))
                calling = message
            elif message.role == "tool":
                first, last = previous is None or previous.role != "tool", following is None or following.role != "tool"
                opening, closing = self.tool_group.before if first else "", self.tool_group.after if last else ""
                parts.append(opening + self.tool_result(message, calling) + closing)
            else:
                parts.append(self.spoken(message))
            previous = message
        return "".join(parts)

    def assistant(self, message: Message, previous: Message | None, *, forgotten: bool) -> str:
        """One assistant turn, from its header to its end."""
        said = self.said(message, previous, forgotten=forgotten)
        return self.header_after(previous) + said + self.ending(message)

    def ending(self, message: Message) -> str:
        """What stands behind what was said."""
        return self.end + self.seam

    def header_after(self, previous: Message | None) -> str:
        """What opens an assistant turn in a history, without prefill."""
        return self.header

    def spoken(self, message: Message) -> str:
        """A user or system message in the middle of a conversation."""
        if message.role == "user":
            return self.user(message.content)
        assert self.system is not None
        return self.system(message.content)

    def forgets_before(self, messages: Sequence[Message]) -> int:
        """Number of leading messages whose reasoning the published template leaves out."""
        return next((i for i in range(len(messages) - 1, -1, -1) if messages[i].role == "user"), 0)

    # --- private ------------------------------------------------------------------------------------------------------

    @property
    def appendable(self) -> frozenset[str]:
        """Roles that may follow an assistant turn."""
        return frozenset({"user", "assistant", "tool"} | ({"system"} if self.system is not None else set()))

    def _check_appendable(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if message.role not in self.appendable:
                raise self._refused(
                    f"a {message.role} message in the middle of a conversation",
                    f"one of {sorted(self.appendable)}",
                    "put it into the first system message, or open a new session",
                )

    def _check_memory(self, stored: Sequence[Message], appended: Sequence[Message]) -> None:
        if self.earlier_reasoning() == "keep":
            return
        # Since the last turn was opened: what the template forgot by then was never in the row.
        before, after = self.forgets_before(stored[:-1]), self.forgets_before([*stored, *appended])
        turns = (message for message in stored[before:after] if message.role == "assistant")
        if any(self.thought(turn) != self.thought(turn, forgotten=True) for turn in turns):
            raise BranchNeeded(
                "the template forgets earlier reasoning here, so the row cannot be extended",
                expected="a new branch, rendered without that reasoning",
                found=f"{appended[0].role!r} after a turn that holds reasoning",
                where="family option earlier_reasoning: branch",
                do="use branching histories, or set earlier_reasoning: keep",
            )

    def _refused(self, what: str, expected: str, do: str) -> SessionError:
        return SessionError(
            f"the token family has no append-only form for {what}",
            expected=expected,
            where=f"family {type(self).__name__}, {self.tokenizer.where}",
            do=do,
        )

    def _control(self, token: str) -> int:
        index = self.tokenizer.token_id(token)
        if index is None or self.tokenizer.encode(token) != [index]:
            raise DataError(
                "the checkpoint lacks a control token of the family",
                expected=f"{token} as one token",
                found="no such token" if index is None else f"text spelled {self.tokenizer.encode(token)}",
                where=self.tokenizer.where,
                do="pick another session.family",
            )
        return index
