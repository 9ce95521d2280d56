"""TITO family: messages to tokens and back, append-only, for one model family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Message, Tool


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

        Raises:
            SessionError: `prefix` ends within a turn; a stop token that was not sampled is not made up.
        """
        ...

    def parse(self, output_ids: Sequence[int]) -> Message:
        """The assistant message the sampled ids spell: content, reasoning, tool calls. Never raises: unparsable tool
        calls stay in the content."""
        ...
