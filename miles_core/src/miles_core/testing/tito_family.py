"""Conformance kit for TITO families: rows grow by appending, and tokens that were sampled are never encoded again.

    class TestMine(TitoFamilyConformance):
        def make(self, tokenizer): return MyFamily(MyOptions(), tokenizer)

The kit brings a byte-level ChatML tokenizer; override `tokenizer` for a family whose control tokens are others.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from miles_core.errors import MilesError, SessionError
from miles_core.kinds.tito_family import SEAM, TitoFamily, joined
from miles_core.testing.tiny import write_tiny_tokenizer
from miles_core.tito.check import PROPERTIES, check, view
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Message, Tool, ToolCall

USER = Message(role="user", content="What is 2 + 2?\n")
ANSWER = Message(role="assistant", content="the thing is 4")
RESULT = Message(role="tool", content='{"sum": 4}', tool_call_id="call_0", name="add")
TOOL: Tool = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}

APPENDED: dict[str, tuple[Message, ...]] = {
    "user": (Message(role="user", content="  and\n3 + 3?"),),
    "tool": (RESULT,),
    "two tools, then a user": (RESULT, replace(RESULT, content="5"), USER),
    "system": (Message(role="system", content="Be brief."), USER),
    "assistant": (Message(role="assistant", content="I meant:"), USER),
}
"""What may follow an assistant turn, by name."""

TEXTS = ("4", "", " ", "\n\nfour\n", "né 中文 👩‍👩‍👧", "<b>&amp;</b>", "a " * 50)


class TitoFamilyConformance:
    """Subclass it and say how to make the family."""

    refuses: ClassVar[frozenset[str]] = frozenset()
    """Keys of `APPENDED` whose roles the family does not append; it must say so with an error."""
    deviates: ClassVar[frozenset[str]] = frozenset()
    """Keys of `APPENDED` for which a row built turn by turn deliberately differs from one rendered at once."""

    def make(self, tokenizer: ChatTokenizer) -> TitoFamily:
        raise NotImplementedError

    def tokenizer(self, folder: Path) -> ChatTokenizer:
        """A tokenizer of the kind the family is for; `folder` is empty and may be written to."""
        write_tiny_tokenizer(folder)
        return ChatTokenizer.from_dir(folder)

    def spell_call(self, name: str, arguments: str) -> str | None:
        """How the model writes a tool call, or None when the family reads none."""
        return None

    # --- the checkpoint -----------------------------------------------------------------------------------------------

    def test_a_claim_is_a_bool(self, tmp_path: Path) -> None:
        tokenizer = self.tokenizer(tmp_path)
        claim: object = type(self.make(tokenizer)).claims(tokenizer)
        assert type(claim) is bool, f"claims returned {claim!r}, a {type(claim).__name__}"

    def test_stop_tokens_are_tokens(self, tmp_path: Path) -> None:
        family = self._family(tmp_path)
        assert family.stop_token_ids, "no stop token: every turn would end by length"
        unknown = [index for index in family.stop_token_ids if family.tokenizer.token(index) is None]
        assert not unknown, f"stop tokens without a token: {unknown}"

    # --- rows ---------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("name", APPENDED)
    def test_a_row_built_turn_by_turn_is_the_row_rendered_at_once(self, name: str, tmp_path: Path) -> None:
        if name in self.refuses | self.deviates:
            pytest.skip(f"declared: {name}")
        family, appended = self._family(tmp_path), APPENDED[name]
        history = [USER]
        row = family.render(history)
        for _ in range(2):
            row = [*row, *family.tokenizer.encode(family.spell(ANSWER, history[-1])), self._stop(family)]
            stored = [*history, ANSWER]
            suffix = family.append(stored, appended)
            row = family.merge(row, suffix)
            history = [*stored, *appended]
        # A reply is tokenized apart from its opener, so its tokens may be others; what it spells may not.
        whole, end = family.render(history), -len(suffix)
        if view(family, row) != view(family, whole) or row[end:] != whole[end:]:
            self._same(family, row, whole, f"{name}: the row built turn by turn")

    @pytest.mark.parametrize("name", APPENDED)
    def test_roles_it_does_not_append_are_refused(self, name: str, tmp_path: Path) -> None:
        if name not in self.refuses:
            pytest.skip("appended")
        with pytest.raises(MilesError):
            self._family(tmp_path).append([USER, ANSWER], APPENDED[name])

    def test_sampled_tokens_are_never_encoded_again(self, tmp_path: Path) -> None:
        family = self._family(tmp_path)
        # The same text in other tokens than the tokenizer would choose, as a model may well sample it.
        odd = [index for letter in ANSWER.content for index in family.tokenizer.encode(letter)]
        assert odd != family.tokenizer.encode(ANSWER.content), "the tokenizer knows one spelling; nothing is tested"
        row = [*family.render([USER]), *odd, self._stop(family)]
        merged = family.merge(row, family.append([USER, ANSWER], APPENDED["user"]))
        kept = len(row) - 1  # a stop token that is the next opener may be replaced by it
        self._same(family, merged[:kept], row[:kept], "the sampled prefix after merge")

    def test_only_appended_messages_are_encoded(self, tmp_path: Path) -> None:
        counting = _Counting.of(self.tokenizer(tmp_path))
        family = self.make(counting)
        short, long = [USER, ANSWER], [USER, replace(ANSWER, content="x" * 500)] * 20
        spent = []
        for stored in (short, [*long, USER, ANSWER]):
            row = [*family.render(stored[:-1]), *counting.encode(family.spell(ANSWER)), self._stop(family)]
            counting.characters = 0
            family.merge(row, family.append(stored, APPENDED["user"]))
            spent.append(counting.characters)
        assert spent[1] <= spent[0] + 64, (
            f"tokenizing a turn costs {spent[1]} characters after a long history and {spent[0]} after a short one"
        )

    def test_a_seam_is_made_from_the_end_of_the_row(self, tmp_path: Path) -> None:
        family = self._family(tmp_path)
        row = [
            *family.render([replace(USER, content="x " * 100)]),
            *family.tokenizer.encode("four"),
            self._stop(family),
        ]
        suffix = family.append([USER, ANSWER], APPENDED["user"])
        seam = family.merge(row[-SEAM:], suffix)
        self._same(family, [*row[:-SEAM], *seam], family.merge(row, suffix), f"merge of the last {SEAM} tokens alone")

    def test_a_turn_without_its_end_is_not_closed_silently(self, tmp_path: Path) -> None:
        family = self._family(tmp_path)
        row = [*family.render([USER]), *family.tokenizer.encode(family.spell(ANSWER))]
        suffix = family.append([USER, ANSWER], APPENDED["user"])
        try:
            merged = family.merge(row, suffix)
        except SessionError:
            return
        seam = family.tokenizer.decode(merged[len(row) - 4 :])
        pytest.fail(f"merge went on after a turn that was cut off: …{seam!r}")

    def test_a_row_depends_on_its_arguments_alone(self, tmp_path: Path) -> None:
        family = self._family(tmp_path)
        stored, appended = [USER, ANSWER], APPENDED["user"]
        row = [*family.render([USER]), *family.tokenizer.encode(family.spell(ANSWER)), self._stop(family)]

        def once() -> list[list[int]]:
            suffix = family.append(stored, appended)
            return [family.render(stored), suffix, family.merge(row, suffix)]

        before = list(row)
        first = once()
        family.render([USER, ANSWER, *APPENDED["user"], ANSWER, USER])
        assert once() == first, "another row the second time"
        assert row == before, "merge changed the prefix it was given"

    def test_tools_do_not_vanish(self, tmp_path: Path) -> None:
        family = self._family(tmp_path)
        try:
            row = family.render([USER], [TOOL])
        except MilesError:
            return  # refusing is honest
        assert "add" in family.tokenizer.decode(row), "the conversation has tools, and its row does not show them"

    # --- what `miles tito check` proves -------------------------------------------------------------------------------

    @pytest.mark.parametrize("name", PROPERTIES)
    def test_it_holds_on_every_conversation_of_miles_tito_check(self, name: str, tmp_path: Path) -> None:
        family = self._family(tmp_path)
        failed = [found for found in check(family, [name]) if found.verdict == "FAILED"]
        assert not failed, "\n".join(f"{found.scenario}: {found.detail}" for found in failed)

    # --- parsing ------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("text", TEXTS)
    def test_plain_text_comes_back(self, text: str, tmp_path: Path) -> None:
        family = self._family(tmp_path)
        for stop in ([self._stop(family)], []):
            found = family.parse([*family.tokenizer.encode(self._lead(family) + text), *stop])
            assert found == Message(role="assistant", content=text), f"{text!r} came back as {found}"

    def test_parsing_never_raises(self, tmp_path: Path) -> None:
        family, draw = self._family(tmp_path), random.Random(0)
        stops = sorted(family.stop_token_ids)
        rows = [[], stops, [family.tokenizer.vocab_size + 5]]
        rows += [[draw.randrange(family.tokenizer.vocab_size) for _ in range(12)] for _ in range(50)]
        for row in rows:
            found = family.parse(row)
            assert found.role == "assistant", f"{row} was parsed as a message of {found.role!r}"

    def test_tool_calls_are_read_to_the_character(self, tmp_path: Path) -> None:
        arguments = '{"b":1,  "a": [1.50, "é"]}'
        text = self.spell_call("add", arguments)
        if text is None:
            pytest.skip("the family reads no tool calls")
        family = self._family(tmp_path)
        (call,) = family.parse([*family.tokenizer.encode(text), self._stop(family)]).tool_calls
        assert call == ToolCall(id=call.id, name="add", arguments=arguments), f"{text!r} was read as {call}"

    def test_broken_tool_calls_stay_in_the_content(self, tmp_path: Path) -> None:
        text = self.spell_call("add", '{"a": ')
        if text is None:
            pytest.skip("the family reads no tool calls")
        family = self._family(tmp_path)
        found = family.parse([*family.tokenizer.encode(text), self._stop(family)])
        assert found == Message(role="assistant", content=text), f"the broken call {text!r} was read as {found}"

    @pytest.mark.parametrize("size", [1, 2, 7])
    def test_what_is_streamed_is_what_is_parsed(self, size: int, tmp_path: Path) -> None:
        family, draw = self._family(tmp_path), random.Random(size)
        call, broken = self.spell_call("add", '{"a": "é"}') or "", self.spell_call("add", '{"a": ') or ""
        texts = [*TEXTS, *(a + call + b + broken + c for a in TEXTS[:4] for b in (" ", "\n", "x") for c in ("", call))]
        lead = self._lead(family)
        rows = [[*family.tokenizer.encode(lead + text), *stop] for text in texts for stop in ([], [self._stop(family)])]
        rows += [[draw.randrange(family.tokenizer.vocab_size) for _ in range(12)] for _ in range(50)]
        for row in rows:
            parser = family.stream_parser()
            deltas = [delta for at in range(0, len(row), size) for delta in parser.feed(row[at : at + size])]
            found, expected = joined([*deltas, *parser.finish()]), family.parse(row)
            expected = replace(expected, reasoning=expected.reasoning or None)
            assert found == expected, f"{family.tokenizer.decode(row)!r} was streamed as {found}, parsed as {expected}"

    def test_text_is_streamed_while_it_is_sampled(self, tmp_path: Path) -> None:
        family = self._family(tmp_path)
        parser, ids = (
            family.stream_parser(),
            family.tokenizer.encode(self._lead(family) + "one two three four five six"),
        )
        early = joined(delta for index in ids[: len(ids) // 2] for delta in parser.feed([index]))
        assert early.content or early.reasoning, "half of a plain text was sampled, and the stream gave out nothing"

    # --- private ------------------------------------------------------------------------------------------------------

    def _family(self, folder: Path) -> TitoFamily:
        return self.make(self.tokenizer(folder))

    def _lead(self, family: TitoFamily) -> str:
        """What a reply begins with before its content: the end of a thought that the opener began, a line break."""
        return family.spell(replace(ANSWER, content="content")).partition("content")[0]

    def _stop(self, family: TitoFamily) -> int:
        """The stop token that ends an assistant turn in a rendered conversation, or gives way to what does."""
        row = family.render([USER, ANSWER, USER])
        found = [index for index in sorted(family.stop_token_ids) if index in row or self._gives_way(family, index)]
        assert found, "no stop token occurs in a rendered conversation, so a sampled turn never ends as it is written"
        return found[0]

    def _gives_way(self, family: TitoFamily, stop: int) -> bool:
        try:
            return family.tokenizer.token(stop) is not None and family.merge([stop, stop], [])[1:2] != [stop]
        except SessionError:
            return False

    def _same(self, family: TitoFamily, found: Sequence[int], expected: Sequence[int], what: str) -> None:
        at = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), None)
        if at is None:
            assert len(found) == len(expected), f"{what} has {len(found)} tokens, expected {len(expected)}"
            return
        near = slice(max(0, at - 5), at + 5)
        pytest.fail(
            f"{what} differs from token {at} on:\n  found    {found[near]} {family.tokenizer.decode(found[near])!r}\n"
            f"  expected {expected[near]} {family.tokenizer.decode(expected[near])!r}"
        )


class _Counting(ChatTokenizer):
    """Counts the characters it encodes."""

    characters = 0

    @classmethod
    def of(cls, tokenizer: ChatTokenizer) -> _Counting:
        counting = cls.__new__(cls)
        counting.__dict__.update(tokenizer.__dict__)
        return counting

    def encode(self, text: str, *, allow_special: bool = True) -> list[int]:
        self.characters += len(text)
        return super().encode(text, allow_special=allow_special)
