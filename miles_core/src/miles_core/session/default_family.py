"""The `default` token family: uses any checkpoint's own chat template, as well as that can work.

It serves conversations in which the template only appends, and refuses the others. There are things it cannot know:
whether the checkpoint was trained on the rows that its template would write for long histories, how it spells tool
calls (Hermes blocks are recognised, other spellings stay in the content), and where reasoning ends. If the template
would leave out tools or tool calls, they are written into the system message and the content in the Hermes style. A
family that was written for the checkpoint is always better.
"""

from __future__ import annotations

from collections.abc import Sequence

from miles_core.errors import DataError, SessionError
from miles_core.session import probe
from miles_core.session.hermes import HermesTurns, inline_calls, inline_tools
from miles_core.session.suffix import appended_ids
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Message, Tool

_PROBE = "probe"


class DefaultFamily(HermesTurns):
    """See `kinds.tito_family.TitoFamily`.

    Args:
        options: None; the family takes none.
        tokenizer: The checkpoint's.

    Raises:
        DataError: the template does not mark the end of an assistant turn in a way that can be recognised.
    """

    def __init__(self, options: None, tokenizer: ChatTokenizer) -> None:
        self.tokenizer = tokenizer
        self._turn_end = _turn_end(tokenizer)
        """Ids the template writes after an assistant's content; empty where the next opener ends the turn."""
        self.stop_token_ids = self._stops()
        self._shows_tools, self._shows_calls = probe.shows_tools(tokenizer), probe.shows_calls(tokenizer)

    @classmethod
    def claims(cls, tokenizer: ChatTokenizer) -> bool:
        """Never. The family is used if a run-file names it, or if no other family claims the checkpoint."""
        return False

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        if tools and not self._shows_tools:
            messages, tools = inline_tools(messages, tools), ()
        return self.tokenizer.encode(self.tokenizer.render(self._shown(messages), tools, add_generation_prompt=True))

    def append(self, stored: Sequence[Message], appended: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        tools = tools if self._shows_tools else ()
        calls = stored[-1].tool_calls if self._shows_calls else ()
        return appended_ids(self.tokenizer, self._shown(appended), tools, calls=calls)

    def merge(self, prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        """Complete the end of the assistant turn as the template writes it.

        Raises:
            SessionError: `prefix` does not end with a finished turn, so that a stop token would have to be made up.
        """
        row, end = list(prefix), self._turn_end
        if end and row[-len(end) :] == end:
            return [*row, *suffix]
        if row and row[-1] in end and row[-1] in self.stop_token_ids:
            return [*row, *end[end.index(row[-1]) + 1 :], *suffix]
        if row and not end and row[-1] in self.stop_token_ids:
            # The sampled stop token is the next message's opener; it may stand there once.
            return [*row[:-1], *suffix]
        raise SessionError(
            "the last turn has no end: its row stops without the token that closes an assistant turn",
            expected=f"one of {[self.tokenizer.token(i) for i in sorted(self.stop_token_ids)]} at the end",
            found=f"{[self.tokenizer.token(i) for i in row[-4:]]}",
            where=self.tokenizer.where,
            do="do not go on after a truncated turn, or pick a family that can close it",
        )

    def _shown(self, messages: Sequence[Message]) -> Sequence[Message]:
        return messages if self._shows_calls else inline_calls(messages)

    def _stops(self) -> frozenset[int]:
        special = self.tokenizer.special_ids
        found = set([index for index in self._turn_end if index in special][:1])
        if self.tokenizer.eos_id is not None:
            found.add(self.tokenizer.eos_id)
        if not self._turn_end:
            opener = appended_ids(self.tokenizer, [Message(role="user", content=_PROBE)])
            found |= set(opener[:1]) & special
        if not found:
            raise DataError(
                "nothing tells where an assistant turn ends",
                expected="an `eos_token` in tokenizer_config.json, or a special token after the assistant's content",
                found=f"the template writes {self.tokenizer.decode(self._turn_end)!r}",
                where=self.tokenizer.where,
                do="pick a session.family written for this checkpoint",
            )
        return frozenset(found)


def _turn_end(tokenizer: ChatTokenizer) -> list[int]:
    turns = (Message(role="user", content="u"), Message(role="assistant", content=_PROBE))
    text = tokenizer.render(turns, add_generation_prompt=False)
    _, probe, end = text.rpartition(_PROBE)
    if not probe:
        raise DataError(
            "the chat template does not show what an assistant said", found=repr(text[-200:]), where=tokenizer.where
        )
    return tokenizer.encode(end)
