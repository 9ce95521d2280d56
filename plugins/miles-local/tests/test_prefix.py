"""The prefix cache finds the longest common prefix, forgets the least used, and never an entry of another session."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from miles_local.prefix import MIN_SHARED, PrefixCache, common_prefix

IDS = st.lists(st.integers(0, 1), max_size=40)


@given(IDS, IDS)
def test_common_prefix_equals_a_plain_loop(left: list[int], right: list[int]) -> None:
    expected = 0
    while expected < min(len(left), len(right)) and left[expected] == right[expected]:
        expected += 1
    assert common_prefix(left, right) == expected


@given(st.lists(st.lists(st.integers(0, 1), min_size=MIN_SHARED, max_size=30), max_size=8), IDS)
def test_find_gives_the_longest_shared_prefix_of_all_entries(entries: list[list[int]], asked: list[int]) -> None:
    cache = PrefixCache(10_000)
    for number, ids in enumerate(entries):
        cache.add(f"session {number}", ids)
    entry, shared = cache.find(asked)
    best = max((common_prefix(ids, asked) for ids in entries), default=0)
    assert shared == (best if best >= MIN_SHARED else 0)
    assert (entry is None) == (shared == 0)
    assert entry is None or entry.token_ids[:shared] == asked[:shared]


@given(st.lists(st.integers(MIN_SHARED, 40), max_size=30))
def test_the_cache_stays_within_its_tokens(lengths: list[int]) -> None:
    cache = PrefixCache(100)
    for number, length in enumerate(lengths):
        cache.add(str(number), [number] * length)
        assert cache.tokens <= 100
        assert cache.find([number] * length)[1] == length


def test_the_least_recently_used_goes_first() -> None:
    cache = PrefixCache(30)
    for name in (1, 2, 3):
        cache.add(str(name), [name] * 10)
    cache.find([1] * 10)
    cache.add("4", [4] * 10)
    assert [cache.find([name] * 10)[1] for name in (1, 2, 3, 4)] == [10, 0, 10, 10]


def test_a_sessions_next_turn_replaces_the_turn_it_extends_and_no_other() -> None:
    cache = PrefixCache(1000)
    cache.add("a", list(range(10)))
    cache.add("b", list(range(10)))
    cache.add("a", list(range(20)))
    assert (len(cache), cache.tokens) == (2, 30)
    cache.add("a", [*range(15), 99, 98, 97])
    assert len(cache) == 3, "a branch of a session keeps the branch it left"


def test_too_long_and_too_short_rows_are_not_kept() -> None:
    cache = PrefixCache(20)
    assert cache.add("a", list(range(21))) is None
    assert cache.add("a", list(range(MIN_SHARED - 1))) is None
    assert len(cache) == 0
