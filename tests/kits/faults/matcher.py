"""Matchers that are wrong in one way each."""

import json

from miles_core.session.matching import strict
from miles_core.testing.matcher import MatcherConformance


class TestReturnsTruthyText(MatcherConformance):
    def make(self):
        return lambda stored, replayed: "yes" if strict(stored, replayed) else ""

    caught_by = {"test_every_verdict_is_a_bool": "only True and False count"}


class TestReturnsNothingForNo(MatcherConformance):
    def make(self):
        return lambda stored, replayed: True if strict(stored, replayed) else None

    caught_by = {"test_every_verdict_is_a_bool": "NoneType"}


class TestLooksAtTextAlone(MatcherConformance):
    """As role and content alone, without saying so."""

    def make(self):
        return lambda stored, replayed: (stored.role, stored.content) == (replayed.role, replayed.content)

    caught_by = {"test_another_message_does_not_match": "differ in tool"}


class TestForgetsTheRole(MatcherConformance):
    def make(self):
        return lambda a, b: (a.content, a.reasoning, a.tool_calls) == (b.content, b.reasoning, b.tool_calls)

    caught_by = {"test_another_message_does_not_match": "differ in role"}


class TestComparesArgumentsByPythonEquality(MatcherConformance):
    """True == 1 in Python, not in JSON."""

    def make(self):
        def values(message):
            return [(call.id, call.name, _value(call.arguments)) for call in message.tool_calls]

        return lambda a, b: a.role == b.role and a.content == b.content and values(a) == values(b)

    caught_by = {"test_another_message_does_not_match": "type of a value"}


class TestRaisesOnBrokenArguments(MatcherConformance):
    def make(self):
        def match(stored, replayed):
            return strict(stored, replayed) and all(json.loads(call.arguments or "{}") for call in stored.tool_calls)

        return match

    caught_by = {
        "test_a_message_matches_itself": "JSONDecodeError",
        "test_every_verdict_is_a_bool": "JSONDecodeError",
        "test_the_verdict_depends_on_the_messages_alone": "JSONDecodeError",
    }


class TestRemembersWhatItSaw(MatcherConformance):
    def make(self):
        seen = []

        def match(stored, replayed):
            seen.append(stored)
            return strict(stored, replayed) and len(seen) < 40

        return match

    caught_by = {"test_the_verdict_depends_on_the_messages_alone": "another verdict the second time"}


class TestComparesIdentity(MatcherConformance):
    def make(self):
        return lambda stored, replayed: stored is replayed

    caught_by = {"test_a_message_matches_itself": "a faithful replay was refused"}


class TestForgivesLessThanItSays(MatcherConformance):
    forgives = frozenset({"tool"})

    def make(self):
        return strict

    caught_by = {"test_what_is_forgiven_is_forgiven": "does not forgive it"}


def _value(arguments):
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
