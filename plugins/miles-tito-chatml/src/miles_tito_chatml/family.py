"""Token family for ChatML: ``<|im_start|>role\\ncontent<|im_end|>\\n`` for every turn.

Where the checkpoint's template writes exactly that, it is used; it knows the checkpoint's default system prompt and,
perhaps, its own form of tools. What the template would leave out without a word (tools, tool calls) is written by
`fixed` instead.

The seam: a template ends every turn with a newline after ``<|im_end|>``, but the model stops at ``<|im_end|>`` and
never samples it. `merge` inserts it, exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence

from miles_core.errors import DataError, SessionError
from miles_core.session.hermes import HermesTurns
from miles_core.session.suffix import appended_ids
from miles_core.tito.options import FamilyOptions
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Message, Tool
from miles_tito_chatml import fixed
from miles_tito_chatml.probe import TemplateFacts, probe

END_OF_TEXT = "<|endoftext|>"
"""Ends a document in pretraining; some checkpoints sample it where a turn should end."""


class ChatMLFamily(HermesTurns):
    """See `kinds.tito_family.TitoFamily`.

    Raises:
        DataError: the tokenizer has no ChatML tokens.
    """

    def __init__(self, options: FamilyOptions, tokenizer: ChatTokenizer) -> None:
        self.tokenizer = tokenizer
        self.options = options
        self._end = _control_token(tokenizer, fixed.END)
        _control_token(tokenizer, fixed.START)
        self._separator = tokenizer.encode("\n")
        ends = {self._end, tokenizer.eos_id, tokenizer.token_id(END_OF_TEXT)}
        self.stop_token_ids = frozenset(index for index in ends if index is not None) & tokenizer.special_ids
        self.facts: TemplateFacts = probe(tokenizer)

    @classmethod
    def claims(cls, tokenizer: ChatTokenizer) -> bool:
        """Whether the checkpoint's template writes plain ChatML for plain conversations, only ever appends, and shows
        tool calls as Hermes blocks if at all."""
        facts = probe(tokenizer)
        return facts.plain_chatml and facts.reads_calls

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        if self._native(messages, tools):
            return self.tokenizer.encode(self.tokenizer.render(messages, tools, add_generation_prompt=True))
        text = fixed.conversation(messages, tools, self.facts.default_system)
        return self.tokenizer.encode(text + fixed.OPENER)

    def append(self, stored: Sequence[Message], appended: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        if self._native([*stored[-1:], *appended], tools):
            return appended_ids(self.tokenizer, appended, tools, calls=stored[-1].tool_calls)
        return self.tokenizer.encode(fixed.turns(appended) + fixed.OPENER)

    def merge(self, prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        """Insert the newline after ``<|im_end|>`` unless it is there.

        Raises:
            SessionError: `prefix` ends within a turn and the option `open_turn` does not allow to close it.
        """
        row, separator = list(prefix), self._separator
        if row[-1:] == [self._end]:
            return [*row, *separator, *suffix]
        if row[-1 - len(separator) :] == [self._end, *separator]:
            return [*row, *suffix]
        if self.options.open_turn == "close":
            return [*row, self._end, *separator, *suffix]
        raise SessionError(
            f"the last turn does not end with {fixed.END}, and a stop token that was not sampled is not made up",
            expected=f"token {self._end} at the end of the row",
            found=f"{[self.tokenizer.token(index) for index in row[-4:]]}",
            where=self.tokenizer.where,
            do="end the episode there, or set session: {family: {use: chatml, open_turn: close}}",
        )

    def _native(self, messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
        """Whether the checkpoint's template is ChatML and shows all that these messages hold.

        Tools and calls go together: a row whose tools were written in one form must not switch to another with the
        first call.
        """
        facts = self.facts
        knows_tools = facts.shows_tools and facts.shows_calls and facts.reads_calls
        return facts.plain_chatml and (knows_tools or not (tools or any(message.tool_calls for message in messages)))


def _control_token(tokenizer: ChatTokenizer, token: str) -> int:
    index = tokenizer.token_id(token)
    if index is None or index not in tokenizer.special_ids:
        raise DataError(
            "the checkpoint has no ChatML tokens",
            expected=f"{token} as a special token",
            found="no such token" if index is None else f"ordinary token {index}",
            where=tokenizer.where,
            do="pick another session.family",
        )
    return index
