"""The diagnosis of a row against its canonical rendering."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from miles_core.contracts.tokens import MISMATCH, MISMATCH_KINDS, check
from miles_core.session.assembly import assemble_all
from miles_core.session.mismatch import compare
from miles_core.testing.tiny import IM_END, IM_START
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import FinishReason, Group, Message, Prompt

U = Message(role="user", content="the thing")


def diagnosis(session: Any) -> Any:
    (found,) = assemble_all(session, prompt_id="p")
    return found.metadata[MISMATCH]


async def test_canonical_rows_have_no_difference(open_session: Any, engine: Any) -> None:
    engine.replies += ["alpha", "beta"]
    session = open_session()
    first = await session.complete([U])
    await session.complete([U, first.message, U])
    assert diagnosis(session) == {"kinds": {}, "first": []}


async def test_other_tokens_of_the_same_text_are_no_difference(
    open_session: Any, engine: Any, tokenizer: ChatTokenizer, make_chunk: Any
) -> None:
    odd = [index for letter in "the thing" for index in tokenizer.encode(letter)]
    assert odd != tokenizer.encode("the thing")
    engine.replies += [[make_chunk([*odd, IM_END])]]
    session = open_session()
    await session.complete([U])
    assert diagnosis(session)["kinds"] == {}


async def test_calls_that_a_template_spells_in_its_own_way_are_assistant_text(open_session: Any, engine: Any) -> None:
    engine.replies += ['Hm. \n\n<tool_call>{"name":"f", "arguments":{"a":1}}</tool_call>']
    session = open_session()
    await session.complete([U])
    found = diagnosis(session)
    assert found["kinds"] == {"assistant_text": 1}
    assert '"arguments":{"a":1}' in found["first"][0]["found"]


async def test_a_cut_turn_is_compared_up_to_its_prompt(
    open_session: Any, engine: Any, tokenizer: ChatTokenizer, make_chunk: Any
) -> None:
    engine.replies += [[make_chunk(tokenizer.encode("alp"), finish=FinishReason.LENGTH)]]
    session = open_session()
    await session.complete([U])
    assert diagnosis(session) == {"kinds": {}, "first": []}


async def test_a_family_that_cannot_render_says_so_and_loses_nothing(open_session: Any, engine: Any) -> None:
    from miles_core.errors import DataError

    session = open_session()
    await session.complete([U])
    session._family = copy.copy(session._family)

    def fails(messages: Any, tools: Any = ()) -> Any:
        raise DataError("no form")

    session._family.render = fails
    assert diagnosis(session) == {"error": "no form"}


def rows(tokenizer: ChatTokenizer) -> dict[str, tuple[list[int], list[int]]]:
    def row(*parts: str | int) -> list[int]:
        return [index for part in parts for index in ([part] if isinstance(part, int) else tokenizer.encode(part))]

    base = row(IM_START, "user", IM_END, "\n", IM_START, "said", IM_END)
    return {
        "special_token_count": (base, [*base, IM_START]),
        "special_token_type": (base, [*base[:-1], IM_START]),
        "non_assistant_text": (base, row(IM_START, "usher", IM_END, "\n", IM_START, "said", IM_END)),
        "assistant_text": (base, row(IM_START, "user", IM_END, "\n", IM_START, "sayd", IM_END)),
    }


@pytest.mark.parametrize("kind", MISMATCH_KINDS)
def test_each_kind_is_told_from_the_others(kind: str, tokenizer: ChatTokenizer) -> None:
    ours, canonical = rows(tokenizer)[kind]
    sampled = [False] * len(ours)
    for at in range(len(ours) - 3, len(ours)):
        sampled[at] = True
    (found,) = compare(tokenizer, ours, sampled, canonical)
    assert found.kind == kind
    assert (found.segment == -1) == (kind == "special_token_count")


async def test_the_tokens_contract_reports_shares_of_rows(open_session: Any, engine: Any) -> None:
    engine.replies += ['<tool_call>{"name":"f", "arguments":{"a":1}}</tool_call>']
    session = open_session()
    await session.complete([U])
    rows = tuple(row.with_reward(1.0) for row in assemble_all(session, prompt_id="p"))
    group = Group(prompt=Prompt(id="p", messages=()), trajectories=rows)
    metrics = check([group]).metrics
    assert metrics["contract/tokens/mismatch_unknown"] == 0.0
    assert metrics["contract/tokens/mismatch_rate"] == 1.0
    assert metrics["contract/tokens/mismatch/assistant_text"] == 1.0
    assert metrics["contract/tokens/mismatch/non_assistant_text"] == 0.0
    unknown = tuple(replace(row, metadata={MISMATCH: {"error": "IndexError"}}) for row in rows)
    metrics = check([replace(group, trajectories=unknown)]).metrics
    assert metrics["contract/tokens/mismatch_unknown"] == 1.0
    assert "contract/tokens/mismatch_rate" not in metrics
