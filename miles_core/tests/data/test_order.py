"""Prompt order: shuffled by (seed, epoch), endless, resumable to the exact next prompt."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.data.order import PromptStream
from miles_core.errors import CheckpointError, DataError
from miles_core.types import Message, Prompt


def prompts(count: int, prefix: str = "p") -> list[Prompt]:
    return [Prompt(id=f"{prefix}{i}", messages=(Message(role="user", content=str(i)),)) for i in range(count)]


def ids(stream: PromptStream, count: int) -> list[str]:
    return [draw.prompt.id for draw in stream.take(count)]


def test_an_epoch_draws_every_prompt_once() -> None:
    drawn = ids(PromptStream(prompts(17), seed=3), 34)
    assert set(Counter(drawn[:17]).values()) == {1}
    assert set(Counter(drawn[17:]).values()) == {1}


def test_epochs_and_seeds_have_different_orders() -> None:
    stream = PromptStream(prompts(30), seed=1)
    first, second = ids(stream, 30), ids(stream, 30)
    other = ids(PromptStream(prompts(30), seed=2), 30)
    assert len({tuple(first), tuple(second), tuple(other)}) == 3


def test_the_order_never_changes_between_releases() -> None:
    assert ids(PromptStream(prompts(6), seed=7), 6) == ["p5", "p1", "p3", "p2", "p0", "p4"]


def test_a_request_larger_than_the_dataset_wraps_as_often_as_needed() -> None:
    drawn = PromptStream(prompts(3), seed=0).take(10)
    assert [draw.epoch for draw in drawn] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert [draw.number for draw in drawn] == list(range(10))
    assert len({(draw.epoch, draw.prompt.id) for draw in drawn}) == 10


@given(
    size=st.integers(1, 9),
    seed=st.integers(0, 5),
    takes=st.lists(st.integers(0, 20), max_size=6),
    cut=st.integers(0, 6),
)
def test_resuming_at_any_point_continues_the_same_sequence(size: int, seed: int, takes: list[int], cut: int) -> None:
    whole = PromptStream(prompts(size), seed=seed)
    expected = [ids(whole, count) for count in takes]
    first = PromptStream(prompts(size), seed=seed)
    found = [ids(first, count) for count in takes[:cut]]
    second = PromptStream(prompts(size), seed=seed)
    second.restore(json.loads(json.dumps(first.state())))
    found += [ids(second, count) for count in takes[cut:]]
    assert found == expected


def test_splitting_a_request_does_not_change_the_sequence() -> None:
    parts = PromptStream(prompts(7), seed=4)
    whole = PromptStream(prompts(7), seed=4)
    cuts = [0, 2, 9, 10, 25]
    assert [name for low, high in pairwise(cuts) for name in ids(parts, high - low)] == ids(whole, 25)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (PromptStream(prompts(5), seed=2), "seed"),
        (PromptStream(prompts(6), seed=1), "size"),
        (PromptStream(prompts(5, "q"), seed=1), "digest"),
    ],
)
def test_a_position_in_other_data_is_refused(other: PromptStream, named: str) -> None:
    stream = PromptStream(prompts(5), seed=1)
    with pytest.raises(CheckpointError, match=named):
        stream.restore(other.state())


def test_no_prompts_is_an_error() -> None:
    with pytest.raises(DataError, match="no prompts"):
        PromptStream([], seed=0)
