"""A proxy agent that replays its history in other words, as harnesses do: what was sampled is extended or kept apart,
and never rebuilt from text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from miles_core.errors import SessionError
from miles_core.kinds.matcher import Matcher
from miles_core.session.factory import History, SessionFactory
from miles_core.session.matching import loose_tool_call, role_content_only, strict
from miles_core.testing.scripted import ScriptedEngine
from miles_core.testing.tiny import IM_END, write_tiny_tokenizer
from miles_core.testing.tito_reference import ADD, NOW
from miles_core.tito.options import ThinkingSwitch
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Message, SamplingParams
from miles_tito_qwen.families import Qwen3Family

ASK = Message(role="user", content="What is 2 + 2?")
TEXTS = [
    '<think>\nTool.\n</think>\n\nI add.\n<tool_call>\n{"name": "add", "arguments": {"a":2,  "tag": "x"}}\n</tool_call>',
    'I ask the time.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "The thing is 4.",
    "the answer once more.",
]
Drift = Callable[[list[Message]], list[Message]]


def respelled(arguments: str) -> Drift:
    """The first call with its arguments in another spelling."""

    def drift(history: list[Message]) -> list[Message]:
        call = replace(history[1].tool_calls[0], arguments=arguments)
        return [history[0], replace(history[1], tool_calls=(call,)), *history[2:]]

    return drift


def changed(at: int, **fields: object) -> Drift:
    return lambda history: [*history[:at], replace(history[at], **fields), *history[at + 1 :]]  # type: ignore[arg-type]


def other_ids(history: list[Message]) -> list[Message]:
    call = replace(history[1].tool_calls[0], id="toolu_1")
    result = replace(history[2], tool_call_id="toolu_1")
    return [history[0], replace(history[1], tool_calls=(call,)), result, *history[3:]]


def no_arguments(history: list[Message]) -> list[Message]:
    call = replace(history[3].tool_calls[0], arguments="")
    return [*history[:3], replace(history[3], tool_calls=(call,)), *history[4:]]


EXTENDS, BRANCHES, REFUSED = "extends", "branches", "refused"
# Drift -> what becomes of the third request: with (linear strict, linear loose, branching strict).
DRIFTS: dict[str, tuple[Drift, tuple[str, str, str]]] = {
    "none": (lambda history: history, (EXTENDS, EXTENDS, EXTENDS)),
    "reordered keys": (respelled('{"tag": "x", "a": 2}'), (REFUSED, EXTENDS, BRANCHES)),
    "white space in arguments": (respelled('{"a": 2, "tag": "x"}'), (REFUSED, EXTENDS, BRANCHES)),
    "another value": (respelled('{"a": 3, "tag": "x"}'), (REFUSED, REFUSED, BRANCHES)),
    "absent arguments": (no_arguments, (BRANCHES, EXTENDS, BRANCHES)),
    "dropped reasoning": (changed(1, reasoning=None), (REFUSED, REFUSED, BRANCHES)),
    "a trailing newline": (changed(1, content="I add.\n"), (REFUSED, REFUSED, BRANCHES)),
    "changed call ids": (other_ids, (REFUSED, REFUSED, BRANCHES)),
    "a dropped turn": (lambda history: [history[0], *history[3:]], (REFUSED, REFUSED, BRANCHES)),
    "compaction to a summary": (
        lambda history: [Message(role="user", content="So far: 2 + 2 was added.")],
        (REFUSED, REFUSED, BRANCHES),
    ),
    "a forked sub-agent": (
        lambda history: [Message(role="system", content="You check."), history[0]],
        (REFUSED, REFUSED, BRANCHES),
    ),
    "a retried last turn": (lambda history: history[:3], (BRANCHES, BRANCHES, BRANCHES)),
}


async def play(folder: Path, drift: Drift, matcher: Matcher, history: History) -> tuple[str, ScriptedEngine]:
    """Two turns as they were, then a request whose history drifted."""
    write_tiny_tokenizer(folder)
    family = Qwen3Family(ThinkingSwitch(), ChatTokenizer.from_dir(folder))
    replies = [oddly(family.tokenizer, text) for text in TEXTS]
    engine = ScriptedEngine(replies)
    factory = SessionFactory([engine], family, matcher, context_length=20_000, history=history)
    session = factory.open("s", SamplingParams(max_tokens=400))
    said: list[Message] = [ASK]
    for _ in range(2):
        reply = (await session.complete(said, [ADD, NOW])).message
        said += [reply, Message(role="tool", content="4", tool_call_id=reply.tool_calls[0].id)]
    row = [*engine.requests[1].token_ids, *replies[1]]
    try:
        await session.complete(drift(list(said)), [ADD, NOW])
    except SessionError:
        return REFUSED, engine
    return (EXTENDS if starts(engine.requests[2].token_ids, row) else BRANCHES), engine


def oddly(tokenizer: ChatTokenizer, text: str) -> list[int]:
    """The reply in other tokens than the tokenizer would choose, so that a row built from its text would differ."""
    parts = re.findall(r"</?\w+>|.", text, re.DOTALL)
    ids = [index for part in parts for index in tokenizer.encode(part)]
    assert ids != tokenizer.encode(text)
    return [*ids, IM_END]


def starts(row: Sequence[int], prefix: Sequence[int]) -> bool:
    return list(row[: len(prefix)]) == list(prefix)


@pytest.mark.parametrize("name", DRIFTS)
async def test_a_drifted_replay_extends_what_was_sampled_or_stands_apart(name: str, tmp_path: Path) -> None:
    drift, expected = DRIFTS[name]
    ways: tuple[tuple[Matcher, History], ...] = ((strict, "linear"), (loose_tool_call, "linear"), (strict, "branching"))
    found = [(await play(tmp_path, drift, matcher, history))[0] for matcher, history in ways]
    assert tuple(found) == expected


async def test_a_retry_samples_from_the_row_that_was_there(tmp_path: Path) -> None:
    outcome, engine = await play(tmp_path, DRIFTS["a retried last turn"][0], strict, "linear")
    assert outcome == BRANCHES
    assert list(engine.requests[2].token_ids) == list(engine.requests[1].token_ids)


async def test_role_and_content_alone_merge_turns_that_called_other_tools(tmp_path: Path) -> None:
    """The danger the matcher warns of, shown: the stored tokens win over a call that the agent replays otherwise."""
    outcome, _ = await play(tmp_path, DRIFTS["another value"][0], role_content_only, "linear")
    assert outcome == EXTENDS
