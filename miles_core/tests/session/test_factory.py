from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.errors import ConfigError, SessionError
from miles_core.session.affinity import Affinity
from miles_core.session.default_family import DefaultFamily
from miles_core.session.factory import SessionFactory, choose_family
from miles_core.session.matching import strict
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Message, SamplingParams

U1, U2 = Message(role="user", content="one"), Message(role="user", content="two")


async def test_all_turns_of_a_session_stay_on_the_least_loaded_engine(
    tokenizer: ChatTokenizer, new_engine: Any
) -> None:
    engines = [new_engine(tokenizer) for _ in range(3)]
    factory = SessionFactory(engines, DefaultFamily(None, tokenizer), strict, context_length=500)
    sessions = [factory.open(f"s{index}", SamplingParams()) for index in range(3)]
    assert factory.load() == (1, 1, 1)
    sessions[1].close()
    sessions[1].close()
    again = factory.open("s3", SamplingParams())
    assert factory.load() == (1, 1, 1)
    first = await again.complete([U1])
    await sessions[0].complete([U1])
    await again.complete([U1, first.message, U2])
    assert [[request.session_id for request in engine.requests] for engine in engines] == [["s0"], ["s3", "s3"], []]


def test_a_name_in_use_is_refused_and_free_again_after_close(tokenizer: ChatTokenizer, new_engine: Any) -> None:
    factory = SessionFactory([new_engine(tokenizer)], DefaultFamily(None, tokenizer), strict, context_length=9)
    session = factory.open("s", SamplingParams())
    with pytest.raises(SessionError, match="is open"):
        factory.open("s", SamplingParams())
    session.close()
    factory.open("s", SamplingParams())


def test_no_engine_is_an_error(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(SessionError, match="no engine"):
        SessionFactory([], DefaultFamily(None, tokenizer), strict, context_length=9)


@given(st.integers(1, 4), st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=40))
def test_loads_count_open_keys_and_the_least_loaded_engine_gets_the_next(
    engines: int, events: list[tuple[bool, int]]
) -> None:
    affinity, homes = Affinity(engines), {}
    for opens, number in events:
        key, before = str(number), affinity.load()
        if not opens:
            affinity.release(key)
            homes.pop(key, None)
        elif key in homes:
            assert affinity.assign(key) == homes[key]
        else:
            homes[key] = affinity.assign(key)
            assert homes[key] == before.index(min(before))
        assert affinity.load() == tuple(list(homes.values()).count(index) for index in range(engines))


class Claims(DefaultFamily):
    @classmethod
    def claims(cls, tokenizer: ChatTokenizer) -> bool:
        return True


class ClaimsNot(DefaultFamily):
    pass


def test_the_one_family_that_claims_is_chosen(tokenizer: ChatTokenizer) -> None:
    name, warning = choose_family(tokenizer, {"a": ClaimsNot, "b": Claims, "default": DefaultFamily})
    assert (name, warning) == ("b", None)


def test_several_claims_are_refused_with_the_candidates(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(ConfigError, match="several token families") as caught:
        choose_family(tokenizer, {"b": Claims, "a": Claims, "default": DefaultFamily})
    assert "found:    a, b" in str(caught.value)


def test_default_serves_where_none_claims_and_warns(tokenizer: ChatTokenizer) -> None:
    choice = choose_family(tokenizer, {"a": ClaimsNot, "default": DefaultFamily})
    assert choice.name == "default"
    assert choice.warning is not None
    assert "best-effort" in choice.warning


def test_default_never_competes_even_if_it_claims(tokenizer: ChatTokenizer) -> None:
    assert choose_family(tokenizer, {"default": Claims, "b": Claims}).name == "b"


def test_a_named_family_needs_no_claim_and_no_warning(tokenizer: ChatTokenizer) -> None:
    families = {"a": ClaimsNot, "b": Claims, "default": DefaultFamily}
    assert choose_family(tokenizer, families, named="a") == ("a", None)
    assert choose_family(tokenizer, families, named="default") == ("default", None)
    with pytest.raises(ConfigError, match="no usable token family is called 'c'"):
        choose_family(tokenizer, families, named="c")


def test_no_claim_and_no_default_is_an_error(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(ConfigError, match="no token family claims"):
        choose_family(tokenizer, {"a": ClaimsNot})
