"""TITO family: messages to tokens and back, append-only, for one model family."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Message, Tool, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """A piece of an assistant message that became certain while its tokens are still being sampled."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    """Whole calls: text is a call only once it is well-formed, since a broken one stays in the content."""


class StreamParser(Protocol):
    """Parses one assistant turn while it is sampled. The deltas joined are `TitoFamily.parse` of all ids, however the
    ids were cut: what could still become something else (half a character, half a tag, white space that a later call
    would swallow) is held back. Never raises, as `parse`."""

    def feed(self, output_ids: Sequence[int]) -> list[Delta]:
        """The next sampled ids; what they made certain, in order. Empty deltas are left out."""
        ...

    def finish(self) -> list[Delta]:
        """What was held back; called once, after the last ids."""
        ...


def joined(deltas: Iterable[Delta]) -> Message:
    """The assistant message that the deltas spell."""
    parts = list(deltas)
    return Message(
        role="assistant",
        content="".join(part.content for part in parts),
        reasoning="".join(part.reasoning for part in parts) or None,
        tool_calls=tuple(call for part in parts for call in part.tool_calls),
    )


SEAM = 64
"""Tokens at the end of a row that `TitoFamily.merge` is shown; a longer row would cost every turn its whole length."""


class TitoFamily(Protocol):
    """Created as ``Family(options, tokenizer)``; pure afterwards.

    Append-only: ``merge(render(M), append(M, S))`` is the row the model continues after `S`, and it starts with the
    ids that were rendered and sampled for M. Sampled ids are never re-encoded.
    """

    tokenizer: ChatTokenizer
    stop_token_ids: frozenset[int]
    """Tokens that end an assistant turn."""

    @classmethod
    def claims(cls, tokenizer: ChatTokenizer) -> bool:
        """Whether this family was written for that checkpoint. Exactly one installed family must claim it, else the
        run-file has to name one."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Ids of a whole conversation plus the opener of the next assistant turn; used once per session, for its
        first turn."""
        ...

    def append(self, stored: Sequence[Message], appended: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Ids of the appended messages alone plus the opener. `stored` ends with the assistant message just sampled;
        it gives context and is not encoded again."""
        ...

    def merge(self, prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        """`prefix + suffix` with the family's boundary repair: a separator the model never samples, a stop token
        that is also the next opener. Of `prefix`, only such a last stop token may go.

        Args:
            prefix: The end of the row, its last `SEAM` tokens (fewer only where the whole row is shorter).

        Raises:
            SessionError: `prefix` ends within a turn; a stop token that was not sampled is not made up.
        """
        ...

    def spell(self, message: Message, after: Message | None = None) -> str:
        """What a model of the family would sample to say `message`: reasoning, content, tool calls, without the stop
        token and without what the opener already holds. `parse` is its inverse.

        Args:
            after: The message that stands before it; some models go on in another way behind a tool result.
        """
        ...

    def parse(self, output_ids: Sequence[int], tools: Sequence[Tool] = ()) -> Message:
        """The assistant message the sampled ids spell: content, reasoning, tool calls. Never raises: unparsable tool
        calls stay in the content.

        Args:
            tools: The conversation's. Some models write arguments as bare text, and only the tool's schema tells
                the number 5 from the string "5".
        """
        ...

    def stream_parser(self, tools: Sequence[Tool] = ()) -> StreamParser:
        """A fresh parser for one turn, for clients that read along; `tools` as in `parse`."""
        ...
