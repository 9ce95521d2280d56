from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.session.matching import (
    MatcherError,
    difference,
    loose_tool_call,
    match_prefix,
    role_content_only,
    strict,
)
from miles_core.types import Message, ToolCall

MATCHERS = (strict, loose_tool_call, role_content_only)


def calling(arguments: str, *, id: str = "c", name: str = "f") -> Message:
    return Message(role="assistant", tool_calls=(ToolCall(id=id, name=name, arguments=arguments),))


def said(content: str = "x", **more: Any) -> Message:
    return Message(role="assistant", content=content, **more)


def test_strict_forgives_nothing_but_ways_to_say_nothing() -> None:
    assert strict(said(), said())
    assert strict(said(reasoning=""), said(reasoning=None))
    assert not strict(said(), said("x "))
    assert not strict(said(), Message(role="user", content="x"))
    assert not strict(said(reasoning="r"), said())
    assert not strict(calling("{}"), said(""))
    assert not strict(calling('{"a":1}'), calling('{"a": 1}'))
    assert not strict(calling("{}"), calling(""))


def test_name_and_call_id_of_a_message_are_not_compared() -> None:
    ours = Message(role="tool", content="2", tool_call_id="c", name="f")
    assert strict(ours, Message(role="tool", content="2"))


@pytest.mark.parametrize(
    ("stored", "replayed"),
    [
        ('{"a":1,"b":[1,2]}', ' { "b" : [1, 2], "a" : 1 }'),
        ("{}", ""),
        ("", " { } "),
        ('{"a":1}', '{"a":1.0}'),
        ('{"a":1e2}', '{"a":100}'),
        ('{"a":"é"}', '{"a":"\\u00e9"}'),
        ('{"a":{"x":1,"y":2}}', '{"a":{"y":2,"x":1}}'),
        ("{broken", "{broken"),
    ],
)
def test_loose_accepts_other_spellings_of_one_object(stored: str, replayed: str) -> None:
    assert loose_tool_call(calling(stored), calling(replayed))


@pytest.mark.parametrize(
    ("stored", "replayed"),
    [
        ('{"a":true}', '{"a":1}'),
        ('{"a":false}', '{"a":0}'),
        ('{"a":null}', '{"a":0}'),
        ('{"a":"1"}', '{"a":1}'),
        ('{"a":[1,2]}', '{"a":[2,1]}'),
        ('{"a":0.1}', '{"a":0.1000000000000000055}'),
        ('{"a":1}', '{"a":1,"b":2}'),
        ('{"a":1,"a":1}', '{"a":1}'),
        ('{"a":NaN}', '{"a": NaN}'),
        ('{"a":Infinity}', '{"a": Infinity}'),
        ("[1]", "[ 1]"),
        ("{broken", "{broken "),
        ("[" * 100_000, "[" * 100_000 + " "),
    ],
)
def test_loose_rejects_what_is_another_value_or_no_plain_object(stored: str, replayed: str) -> None:
    assert not loose_tool_call(calling(stored), calling(replayed))
    assert loose_tool_call(calling(stored), calling(stored))


def test_loose_compares_all_the_rest_strictly() -> None:
    one = calling("{}")
    assert not loose_tool_call(one, calling("{}", id="d"))
    assert not loose_tool_call(one, calling("{}", name="g"))
    assert not loose_tool_call(one, said("", tool_calls=one.tool_calls * 2))
    assert not loose_tool_call(said(reasoning="r"), said())
    a, b = ToolCall(id="1", name="f", arguments=""), ToolCall(id="2", name="g", arguments="")
    assert not loose_tool_call(said("", tool_calls=(a, b)), said("", tool_calls=(b, a)))


def test_role_content_only_confuses_turns_that_called_different_tools() -> None:
    assert role_content_only(calling("{}", name="read"), calling("{}", name="delete"))
    assert not role_content_only(said("a"), said("b"))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=3), JSON, max_size=4), st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_loose_matches_any_reserialisation(value: dict[str, Any], random: Any) -> None:
    shuffled = dict(random.sample(list(value.items()), len(value)))
    ours = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    assert loose_tool_call(calling(ours), calling(json.dumps(shuffled, indent=1)))


@given(
    st.lists(st.builds(Message, role=st.sampled_from(["user", "assistant"]), content=st.text(max_size=1)), max_size=4)
)
def test_looser_matchers_accept_whatever_stricter_ones_do(messages: list[Message]) -> None:
    for ours, theirs in itertools.product(messages, repeat=2):
        if strict(ours, theirs):
            assert loose_tool_call(ours, theirs)
            assert role_content_only(ours, theirs)


def test_the_prefix_ends_at_the_first_difference() -> None:
    stored = [said("a"), said("b"), said("c")]
    assert match_prefix(stored, [said("a"), said("x"), said("c")], strict) == 1
    assert match_prefix(stored, stored[:2], strict) == 2
    assert match_prefix(stored, [*stored, said("d")], strict) == 3
    assert match_prefix([], stored, strict) == 0


@pytest.mark.parametrize("answer", [1, "yes", None, []])
def test_a_matcher_that_returns_no_bool_is_named(answer: object) -> None:
    def truthy(stored: Message, replayed: Message) -> Any:
        return answer

    with pytest.raises(MatcherError, match=r"test_matching:.*truthy must return True or False"):
        match_prefix([said()], [said()], truthy)


def test_a_matcher_that_raises_is_named_with_its_error() -> None:
    def broken(stored: Message, replayed: Message) -> bool:
        raise KeyError("oops")

    with pytest.raises(MatcherError, match=r"broken raised KeyError: 'oops'"):
        match_prefix([said()], [said()], broken)


def test_the_difference_shows_the_fields_that_differ_and_clips_long_text() -> None:
    ours, theirs = difference([said("a" * 1000, reasoning="same")], [said("b", reasoning="same")], 0)
    assert "reasoning" not in ours + theirs
    assert len(ours) < 250
    assert "content='b'" in theirs
    assert difference([said()], [], 0)[1] == "the history ends after 0 message(s)"
