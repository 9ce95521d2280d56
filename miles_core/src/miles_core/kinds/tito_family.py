"""TITO family ("tokens in, tokens out"): turns messages into tokens, by appending only, and tokens into messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Message, Tool, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """A piece of an assistant message that is certain already, while further tokens are still being sampled."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    """Whole calls only: until a call is well-formed, it may turn out to be plain text."""


class StreamParser(Protocol):
    """Parses one assistant turn while it is sampled.

    However the ids are cut into pieces, all deltas joined are the message that `TitoFamily.parse` makes of all ids.
    Whatever could still become something else is held back: half a character, half a tag, white space before a tool
    call. Like `parse`, it never raises.
    """

    def feed(self, output_ids: Sequence[int]) -> list[Delta]:
        """Take the next sampled ids, and return what is certain now, in order and without empty deltas."""
        ...

    def finish(self) -> list[Delta]:
        """Return what was held back. Called once, after the last ids."""
        ...


def joined(deltas: Iterable[Delta]) -> Message:
    """The assistant message that the deltas make up."""
    parts = list(deltas)
    return Message(
        role="assistant",
        content="".join(part.content for part in parts),
        reasoning="".join(part.reasoning for part in parts) or None,
        tool_calls=tuple(call for part in parts for call in part.tool_calls),
    )


SEAM = 64
"""How many tokens at the end of a row `TitoFamily.merge` gets to see, so that its work does not grow with the row."""


class TitoFamily(Protocol):
    """Created as ``Family(options, tokenizer)``. Its methods are pure.

    The first prompt of a session is ``render(messages)``. Every later one is
    ``merge(row, append(stored, new_messages))``, where `row` holds everything rendered and sampled so far: rows grow by
    appending, and tokens that were sampled are never encoded again.
    """

    tokenizer: ChatTokenizer
    stop_token_ids: frozenset[int]
    """Tokens that end an assistant turn."""

    @classmethod
    def claims(cls, tokenizer: ChatTokenizer) -> bool:
        """Whether this family was written for that checkpoint. If exactly one installed family claims a checkpoint, the
        run-file need not name it."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Ids of a whole conversation, and of the opener: what the next assistant turn begins with. Used once in a
        session, for its first turn."""
        ...

    def append(self, stored: Sequence[Message], appended: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Ids of the appended messages alone, and of the opener.

        Args:
            stored: The messages before them, the last one the assistant's. They give context and are not encoded.
        """
        ...

    def merge(self, prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        """`prefix` followed by `suffix`, with what must stand between them but is never sampled, such as a newline.

        Nothing of `prefix` may change, with one exception: a last stop token may give way if the suffix begins with
        it, or with what the format puts in its place.

        Args:
            prefix: The last `SEAM` tokens of the row, or the whole row if it is shorter.

        Raises:
            SessionError: `prefix` ends within a turn. A stop token that was not sampled is not made up.
        """
        ...

    def spell(self, message: Message, after: Message | None = None) -> str:
        """The text a model of this family would sample to say `message`: reasoning, content and tool calls, without the
        stop token and without what the opener holds already. `parse` is its inverse.

        Args:
            after: The message before it; after a tool result, some models begin their turn in another way.
        """
        ...

    def parse(self, output_ids: Sequence[int], tools: Sequence[Tool] = ()) -> Message:
        """The assistant message that sampled ids stand for: content, reasoning, tool calls. Never raises; a tool call
        that is not well-formed stays in the content.

        Args:
            tools: Tools of the conversation. Some models write arguments as bare text, and only the tool's schema
                tells the number 5 from the string "5".
        """
        ...

    def stream_parser(self, tools: Sequence[Tool] = ()) -> StreamParser:
        """A new parser for one turn, for clients that read it while it is sampled; `tools` as in `parse`."""
        ...
