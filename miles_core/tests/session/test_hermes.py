from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.kinds.tito_family import joined
from miles_core.session.hermes import HermesStream, parse_tool_calls, spell_tool_calls
from miles_core.types import Message, ToolCall


def test_arguments_keep_the_characters_the_model_wrote() -> None:
    text = 'Let me see.\n<tool_call>\n{ "arguments" : {"b":1,  "a": 1.50} , "name":"add"}\n</tool_call>'
    content, calls = parse_tool_calls(text)
    assert content == "Let me see."
    assert calls == (ToolCall(id="call_0", name="add", arguments='{"b":1,  "a": 1.50}'),)


def test_several_calls_are_numbered_and_text_around_them_stays() -> None:
    block = '<tool_call>{"name": "f"}</tool_call>'
    content, calls = parse_tool_calls(f"a {block} b {block}")
    assert content == "a  b"
    assert [(call.id, call.arguments) for call in calls] == [("call_0", "{}"), ("call_1", "{}")]


def test_arguments_written_as_a_string_are_unwrapped() -> None:
    _, calls = parse_tool_calls('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>')
    assert calls[0].arguments == '{"a": 1}'


@pytest.mark.parametrize(
    "body",
    [
        "",
        "not json",
        "[]",
        '{"name": "f", "arguments": {"a": }}',
        '{"name": "f"',
        '{"name": "f"} trailing',
        '{"name": "f" "arguments": {}}',
        '{"name": 3}',
        '{"name": ""}',
        '{"arguments": {}}',
        '{"name": "f", "name": "g"}',
        '{"name": "f",}',
        '{1: 2, "name": "f"}',
        '{"name": "f", "arguments": ' + "[" * 100_000,
    ],
)
def test_what_is_no_well_formed_call_stays_in_the_content(body: str) -> None:
    text = f" <tool_call>{body}</tool_call>\n"
    assert parse_tool_calls(text) == (text, ())


def test_a_broken_block_stays_beside_a_good_one() -> None:
    content, calls = parse_tool_calls('<tool_call>x</tool_call><tool_call>{"name": "f"}</tool_call>')
    assert content == "<tool_call>x</tool_call>"
    assert len(calls) == 1


def test_an_opening_tag_without_end_does_not_hide_the_next_call() -> None:
    content, calls = parse_tool_calls('<tool_call> I mean <tool_call>{"name": "f"}</tool_call>')
    assert content == "<tool_call> I mean"
    assert len(calls) == 1


def test_a_model_stuck_on_opening_tags_costs_linear_time() -> None:
    text = "<tool_call>" * 200_000
    assert parse_tool_calls(text) == (text, ())


@given(st.text(max_size=20))
@settings(max_examples=40)
def test_parsing_never_raises_and_text_without_blocks_is_untouched(text: str) -> None:
    content, calls = parse_tool_calls(f"{text}<tool_call>{text}")
    assert calls or content == f"{text}<tool_call>{text}"


NAMES = st.text(min_size=1, max_size=5)
VALUES = st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=4) | st.none(), max_size=3)


@given(st.lists(st.tuples(NAMES, VALUES), min_size=1, max_size=3))
def test_spelling_and_parsing_are_inverse(calls: list[tuple[str, dict[str, Any]]]) -> None:
    built = tuple(
        ToolCall(id=f"call_{at}", name=name, arguments=json.dumps(value)) for at, (name, value) in enumerate(calls)
    )
    assert parse_tool_calls(spell_tool_calls("say", built)) == ("say", built)


@pytest.mark.parametrize("size", [1, 3])
def test_a_stream_gives_out_text_around_a_call_and_the_call_at_its_end(size: int) -> None:
    text = 'Hm.\n<tool_call>\n{"name": "f", "arguments": {"a":1}}\n</tool_call>\n'
    stream, early = HermesStream(), []
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    for piece in pieces[:-1]:
        early += stream.feed(piece)
    assert joined(early).content == "Hm."
    message = joined([*early, *stream.feed(pieces[-1]), *stream.finish()])
    assert message == Message(
        role="assistant", content="Hm.", tool_calls=(ToolCall(id="call_0", name="f", arguments='{"a":1}'),)
    )


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}', " ", "\n", "x", "<tool", '"']
)


@given(st.lists(PIECES, max_size=14), st.integers(1, 40))
def test_a_stream_says_the_same_however_it_is_cut(pieces: list[str], size: int) -> None:
    text = "".join(pieces)
    stream = HermesStream()
    deltas = [delta for at in range(0, len(text), size) for delta in stream.feed(text[at : at + size])]
    message = joined([*deltas, *stream.finish()])
    assert (message.content, message.tool_calls) == parse_tool_calls(text)


@given(st.lists(PIECES, max_size=14))
def test_every_character_outside_a_call_stays_but_white_space(pieces: list[str]) -> None:
    text = "".join(pieces)
    content, calls = parse_tool_calls(text)
    if not calls:
        assert content == text
    spelled = len(calls) * '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert sorted("".join((content + spelled).split())) == sorted("".join(text.split()))
