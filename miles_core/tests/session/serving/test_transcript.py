from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.session.serving.problems import Refused
from miles_core.session.serving.transcript import Transcript
from miles_core.types import Message


def parse(item: Any, at: str) -> tuple[Message, ...]:
    if item == "bad":
        raise Refused(400, "bad", param=at)
    return tuple(Message(role="user", content=f"{item!r}/{part}") for part in range(1 + len(str(item)) % 2))


ITEMS = st.lists(st.sampled_from(["a", "bb", {"x": 1}, {"x": True}, {"x": 1.0}, {"x": [1]}]), max_size=6)


@given(st.lists(ITEMS, max_size=6))
def test_a_history_reads_the_same_with_and_without_the_one_before(histories: list[list[Any]]) -> None:
    transcript = Transcript()
    for items in histories:
        assert transcript.read(items, parse, "m") == Transcript().read(items, parse, "m")


def test_equal_items_are_the_same_messages() -> None:
    transcript = Transcript()
    first = transcript.read(["a", "b"], parse, "m")
    second = transcript.read(["a", "b", "c"], parse, "m")
    assert all(ours is theirs for ours, theirs in zip(first, second, strict=False))


def test_a_refused_item_is_named_by_its_place_and_nothing_is_remembered() -> None:
    transcript = Transcript()
    transcript.read(["a", "b"], parse, "m")
    with pytest.raises(Refused) as caught:
        transcript.read(["a", "c", "bad"], parse, "m")
    assert caught.value.param == "m.2"
    assert transcript.read(["a", "b"], parse, "m") == Transcript().read(["a", "b"], parse, "m")
