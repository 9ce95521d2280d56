"""Conformance kit for matchers: the answer is a bool, depends on the two messages alone, and tells messages apart.

    class TestMine(MatcherConformance):
        def make(self): return my_matcher

A matcher may accept another spelling of the same message. If it also accepts another role, text or tool call, it must
say so in `forgives`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest

from miles_core.kinds.matcher import Matcher
from miles_core.types import Message, ToolCall

_CALL = ToolCall(id="c0", name="add", arguments='{"a": 1, "b": [1, 2]}')

MESSAGES: dict[str, Message] = {
    "text": Message(role="assistant", content="4"),
    "nothing": Message(role="assistant"),
    "call": Message(role="assistant", tool_calls=(_CALL,)),
    "text and calls": Message(role="assistant", content="so", tool_calls=(_CALL, replace(_CALL, id="c1"))),
    "broken arguments": Message(role="assistant", tool_calls=(replace(_CALL, arguments='{"a": '),)),
    "no arguments": Message(role="assistant", tool_calls=(replace(_CALL, arguments=""),)),
    "reasoning": Message(role="assistant", content="4", reasoning="2 and 2"),
    "result": Message(role="tool", content="4", tool_call_id="c0"),
}
"""Messages by what is special of them; each must match itself."""


def _calling(**changes: Any) -> Message:
    return Message(role="assistant", tool_calls=(replace(_CALL, **changes),))


DIFFERENCES: dict[str, tuple[Message, Message]] = {
    "role": (MESSAGES["text"], Message(role="user", content="4")),
    "content": (MESSAGES["text"], Message(role="assistant", content="5")),
    "tool": (MESSAGES["call"], _calling(name="delete")),
    "arguments": (MESSAGES["call"], _calling(arguments='{"a": 2, "b": [1, 2]}')),
    "order of a list": (MESSAGES["call"], _calling(arguments='{"a": 1, "b": [2, 1]}')),
    "type of a value": (MESSAGES["call"], _calling(arguments='{"a": true, "b": [1, 2]}')),
    "number of calls": (MESSAGES["text and calls"], replace(MESSAGES["text and calls"], tool_calls=(_CALL,))),
    "call dropped": (MESSAGES["call"], MESSAGES["nothing"]),
}
"""What sets two messages apart; none of it may pass as a spelling."""


class MatcherConformance:
    """Subclass it and say how to make the matcher."""

    forgives: ClassVar[frozenset[str]] = frozenset()
    """Keys of `DIFFERENCES` the matcher deliberately ignores."""

    def make(self) -> Matcher:
        raise NotImplementedError

    @pytest.mark.parametrize("name", MESSAGES)
    def test_a_message_matches_itself(self, name: str) -> None:
        assert self._verdict(MESSAGES[name], replace(MESSAGES[name])), f"{name}: a faithful replay was refused"

    @pytest.mark.parametrize("name", DIFFERENCES)
    def test_another_message_does_not_match(self, name: str) -> None:
        if name in self.forgives:
            pytest.skip(f"the matcher forgives another {name}")
        stored, replayed = DIFFERENCES[name]
        for ours, theirs in ((stored, replayed), (replayed, stored)):
            assert not self._verdict(ours, theirs), f"messages that differ in {name} matched: {ours} and {theirs}"

    def test_what_is_forgiven_is_forgiven(self) -> None:
        unknown = self.forgives - DIFFERENCES.keys()
        assert not unknown, f"unknown differences {sorted(unknown)}"
        for name in self.forgives:
            assert self._verdict(*DIFFERENCES[name]), f"`forgives` names {name}, but the matcher does not forgive it"

    @pytest.mark.parametrize("name", MESSAGES)
    def test_every_verdict_is_a_bool(self, name: str) -> None:
        matcher = self.make()
        for other in MESSAGES.values():
            verdict: object = matcher(MESSAGES[name], other)
            assert type(verdict) is bool, f"returned {verdict!r}, a {type(verdict).__name__}; only True and False count"

    def test_the_verdict_depends_on_the_messages_alone(self) -> None:
        matcher = self.make()
        pairs = [(a, b) for a in MESSAGES.values() for b in MESSAGES.values()]
        first = [bool(matcher(a, b)) for a, b in pairs]
        again = [bool(matcher(a, b)) for a, b in reversed(pairs)][::-1]
        assert first == again, "another verdict the second time; a history is matched anew with every turn"

    def _verdict(self, stored: Message, replayed: Message) -> bool:
        return bool(self.make()(stored, replayed))
