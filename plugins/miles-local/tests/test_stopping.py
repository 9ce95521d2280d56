"""Stop strings are found when their last token arrives, however tokens cut them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from miles_core.testing.tiny import write_tiny_tokenizer
from miles_local.stopping import ends_with_stop, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder)
    return load_tokenizer(Path(folder))


def first_stop(tokenizer: Tokenizer, ids: list[int], stop: list[str]) -> int | None:
    return next((n for n in range(1, len(ids) + 1) if ends_with_stop(tokenizer, ids[:n], stop)), None)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 274), max_size=60),
    st.lists(st.text("ab \n<é🙂", min_size=1, max_size=5), min_size=1, max_size=3),
    st.integers(0, 60),
)
def test_looking_at_the_tail_finds_what_decoding_everything_finds(
    tokenizer: Tokenizer, ids: list[int], stop: list[str], at: int
) -> None:
    ids = [*ids[:at], *tokenizer.encode(stop[0]).ids, *ids[at:]]
    whole = (tokenizer.decode(ids[:n], skip_special_tokens=False) for n in range(1, len(ids) + 1))
    expected = next((n for n, text in enumerate(whole, 1) if any(string in text for string in stop)), None)
    assert first_stop(tokenizer, ids, stop) == expected


def test_a_string_within_special_tokens_and_across_tokens_stops(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a the end<|im_end|>\n").ids
    assert first_stop(tokenizer, ids, ["<|im_end|>"]) == len(ids) - 1
    assert first_stop(tokenizer, ids, ["e en"]) == len(tokenizer.encode("a the en").ids)
    assert first_stop(tokenizer, ids, ["never"]) is None
