"""Random conversations against a plain bookkeeping of what must hold of the row, whatever is said and sampled."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.errors import SessionError
from miles_core.kinds.engine import Chunk
from miles_core.session.assembly import assemble
from miles_core.session.default_family import DefaultFamily
from miles_core.session.factory import SessionFactory
from miles_core.session.matching import strict
from miles_core.testing.tiny import IM_END
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import FinishReason, Message, SamplingParams

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=8) | st.sampled_from(["<|im_end|>", "\n\n", "the"])
APPENDED = st.lists(
    st.builds(Message, role=st.sampled_from(["user", "tool", "system", "assistant"]), content=TEXT),
    min_size=1,
    max_size=3,
)


@dataclass(frozen=True)
class Reply:
    """Sampled tokens in pieces: (ids, weight version) of each chunk; the stop token follows."""

    pieces: list[tuple[list[int], int]]

    def chunks(self) -> list[Chunk]:
        pieces = [*self.pieces, ([IM_END], self.pieces[-1][1] if self.pieces else 0)]
        seen, made = 0, []
        for position, (ids, version) in enumerate(pieces):
            finish = FinishReason.STOP if position == len(pieces) - 1 else None
            logprobs = tuple(-(seen + at + 1) / 8 for at in range(len(ids)))
            seen += len(ids)
            made.append(Chunk(token_ids=tuple(ids), logprobs=logprobs, weight_version=version, finish_reason=finish))
        return made


# Any id but the stop tokens, canonical or not, valid UTF-8 or not.
REPLY = st.lists(st.tuples(st.lists(st.integers(3, 274), max_size=5), st.integers(0, 2)), max_size=3).map(Reply)
TURNS = st.lists(st.tuples(st.sampled_from(["extend", "extend", "retry", "edit"]), APPENDED, REPLY), max_size=6)


@dataclass
class Book:
    """What a session must hold, kept the simple way: one entry a turn."""

    turns: list[tuple[list[int], list[Chunk]]] = field(default_factory=list)
    histories: list[list[Message]] = field(default_factory=lambda: [[]])
    """Messages after each number of turns."""

    def row(self) -> list[int]:
        prompt, chunks = self.turns[-1]
        return [*prompt, *(token for chunk in chunks for token in chunk.token_ids)]

    def sampled(self) -> list[tuple[int, float, int]]:
        chunks = [chunk for _, chunks in self.turns for chunk in chunks]
        return [
            (token, logprob, chunk.weight_version)
            for chunk in chunks
            for token, logprob in zip(chunk.token_ids, chunk.logprobs, strict=True)
        ]


async def play(tokenizer: ChatTokenizer, engine: Any, turns: list[tuple[str, list[Message], Reply]]) -> None:
    family = DefaultFamily(None, tokenizer)
    session = SessionFactory([engine], family, strict, context_length=100_000).open("s", SamplingParams(seed=1))
    book = Book()
    for action, appended, reply in turns:
        if action != "extend" and book.turns:
            book.turns.pop()
            dropped = book.histories.pop()
            # An assistant message here could happen to equal the dropped answer; that would be no retry.
            appended = [replace(each, role="user") if each.role == "assistant" else each for each in appended]
            if action == "edit":
                # The agent keeps the dropped turn's messages but writes the assistant's itself.
                kept = len(book.histories[-1])
                appended = [*dropped[kept:-1], Message(role="assistant", content="edited"), *appended]
        chunks = reply.chunks()
        engine.replies.append(chunks)
        history = [*book.histories[-1], *appended]
        before = book.row() if book.turns else []
        answer = await session.complete(history)
        prompt = list(engine.requests[-1].token_ids)

        # Prefix identity: the prompt continues the very row that was committed.
        assert prompt[: len(before)] == before
        if not before:
            assert prompt == family.render(history)
        book.turns.append((prompt, chunks))
        book.histories.append([*history, answer.message])

        row = assemble(session, prompt_id="p")
        assert row.token_ids.tolist() == book.row()  # the row is what the engine saw and said
        at = np.flatnonzero(row.loss_mask)
        versions = np.full(row.length, -1)
        for span in row.spans:
            versions[span.start : span.end] = span.weight_version
        found = list(zip(row.token_ids[at].tolist(), row.logprobs[at].tolist(), versions[at].tolist(), strict=True))
        assert found == book.sampled()  # every kept sampled token once, with its own log-prob and version
        assert row.messages == tuple(book.histories[-1])


@given(TURNS)
@settings(max_examples=80, deadline=None)
def test_the_row_is_what_the_engine_saw_and_every_sampled_token_is_in_it_once(
    tokenizer: ChatTokenizer, new_engine: Any, turns: list[tuple[str, list[Message], Reply]]
) -> None:
    asyncio.run(play(tokenizer, new_engine(tokenizer), turns))


async def refused_drift(tokenizer: ChatTokenizer, engine: Any, replies: list[Reply], at: int) -> None:
    family = DefaultFamily(None, tokenizer)
    session = SessionFactory([engine], family, strict, context_length=100_000).open("s", SamplingParams())
    history: list[Message] = []
    for reply in replies:
        engine.replies.append(reply.chunks())
        history.append(Message(role="user", content="u"))
        history.append((await session.complete(history)).message)
    row, stored = session.row.ids(), session.messages
    drifted = list(history)
    drifted[at] = Message(role=drifted[at].role, content=drifted[at].content + " ")
    with pytest.raises(SessionError, match=f"message {at}: role='{drifted[at].role}'"):
        await session.complete([*drifted, Message(role="user", content="u")])
    assert session.row.ids() == row
    assert session.messages == stored


@given(st.lists(REPLY, min_size=2, max_size=4), st.data())
@settings(max_examples=20, deadline=None)
def test_a_drift_before_the_latest_turn_is_refused_and_changes_nothing(
    tokenizer: ChatTokenizer, new_engine: Any, replies: list[Reply], data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, 2 * len(replies) - 3))
    asyncio.run(refused_drift(tokenizer, new_engine(tokenizer), replies, at))


class CountingTokenizer(ChatTokenizer):
    characters = 0

    def encode(self, text: str, *, allow_special: bool = True) -> list[int]:
        self.characters += len(text)
        return super().encode(text, allow_special=allow_special)

    def decode(self, ids: Any, *, skip_special: bool = False) -> str:
        self.characters += len(ids)
        return super().decode(ids, skip_special=skip_special)


async def test_tokenizing_a_turn_costs_what_it_appends_however_long_the_session(
    tokenizer: ChatTokenizer, engine: Any
) -> None:
    counting = CountingTokenizer.__new__(CountingTokenizer)
    counting.__dict__.update(tokenizer.__dict__)
    factory = SessionFactory([engine], DefaultFamily(None, counting), strict, context_length=100_000)
    session = factory.open("s", SamplingParams())
    history = [Message(role="user", content="hello")]
    spent = []
    for _ in range(200):
        counting.characters = 0
        history.append((await session.complete(history)).message)
        history.append(Message(role="tool", content="result " * 5))
        spent.append(counting.characters)
    assert len(set(spent[1:])) == 1, "the cost of a turn changes with the history"
    assert spent[1] < 6 * len("result " * 5) + 200
