from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from miles_core.errors import DataError, SessionError
from miles_core.kinds.tito_family import TitoFamily
from miles_core.session.assembly import assemble
from miles_core.session.factory import SessionFactory
from miles_core.session.hermes import spell_tool_calls
from miles_core.session.matching import strict
from miles_core.testing.scripted import ScriptedEngine
from miles_core.testing.tiny import IM_END, write_tiny_tokenizer
from miles_core.testing.tito_family import TitoFamilyConformance
from miles_core.tito.options import FamilyOptions
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Message, SamplingParams, ToolCall
from miles_tito_chatml.family import ChatMLFamily

USER, ANSWER = Message(role="user", content="u"), Message(role="assistant", content="a")
SYSTEM = Message(role="system", content="S")
CALL = ToolCall(id="c", name="add", arguments='{"x":  1}')
SAID = Message(role="assistant", content="so", tool_calls=(CALL,))
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}

TURNS = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
OPENER = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
DEFAULT = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou are nice.<|im_end|>\\n' }}{% endif %}"
    + TURNS
    + OPENER
)
"""As SmolLM2's: a system prompt of its own where there is none, and no idea of tools."""
THINKS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}"
    "{{ m.content + '<|im_end|>\\n' }}{% endfor %}" + OPENER
)
SHOWS_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\\nTools: ' + tools | tojson + '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '#' + c.function.name + c.function.arguments | tojson }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}" + OPENER
)
HERMES = SHOWS_TOOLS.replace(
    "{{ '#' + c.function.name + c.function.arguments | tojson }}",
    "{% if m.content or not loop.first %}{{ '\\n' }}{% endif %}"
    '{{ \'<tool_call>\\n{"name": "\' + c.function.name + \'", "arguments": \' + c.function.arguments | tojson'
    " + '}\\n</tool_call>' }}",
)

Make = Callable[..., ChatMLFamily]


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str], ChatTokenizer]:
    def make(template: str = DEFAULT) -> ChatTokenizer:
        write_tiny_tokenizer(tmp_path)
        (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
        return ChatTokenizer.from_dir(tmp_path)

    return make


@pytest.fixture
def make(load: Callable[[str], ChatTokenizer]) -> Make:
    def family(template: str = DEFAULT, **options: object) -> ChatMLFamily:
        return ChatMLFamily(FamilyOptions.model_validate(options), load(template))

    return family


class Conformance(TitoFamilyConformance):
    template: str

    def make(self, tokenizer: ChatTokenizer) -> TitoFamily:
        return ChatMLFamily(FamilyOptions(), tokenizer)

    def tokenizer(self, folder: Path) -> ChatTokenizer:
        write_tiny_tokenizer(folder)
        (folder / "chat_template.jinja").write_text(self.template, encoding="utf-8")
        return ChatTokenizer.from_dir(folder)

    def spell_call(self, name: str, arguments: str) -> str:
        return spell_tool_calls("", [ToolCall(id="c", name=name, arguments=arguments)])


class TestWithADefaultSystemPrompt(Conformance):
    template = DEFAULT


class TestWithATemplateThatShowsTools(Conformance):
    template = SHOWS_TOOLS


class TestWithATemplateThatSpellsCallsAsTheFamilyReadsThem(Conformance):
    template = HERMES


class TestWithATemplateThatIsNotAppendOnly(Conformance):
    template = THINKS


# --- which checkpoints ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [DEFAULT, HERMES, TURNS + OPENER])
def test_plain_chatml_is_claimed(load: Callable[[str], ChatTokenizer], template: str) -> None:
    assert ChatMLFamily.claims(load(template))


@pytest.mark.parametrize(
    "template",
    [
        THINKS,
        TURNS.replace("m.content", "m.content | trim") + OPENER,
        TURNS.replace("<|im_end|>\\n", "<|im_end|>") + OPENER,
        TURNS,  # writes no opener
        SHOWS_TOOLS,  # in a spelling that the family does not read
        "{{ messages | length }}" + TURNS + OPENER,
        "{{ raise_exception('no') }}",
    ],
)
def test_other_templates_are_not_claimed(load: Callable[[str], ChatTokenizer], template: str) -> None:
    assert not ChatMLFamily.claims(load(template))


def test_a_tokenizer_without_the_tokens_is_not_claimed_and_refused_when_named(
    load: Callable[[str], ChatTokenizer], tmp_path: Path
) -> None:
    load(DEFAULT)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace("<|im_end|>", "<|other|>"))
    tokenizer = ChatTokenizer.from_dir(tmp_path)
    assert not ChatMLFamily.claims(tokenizer)
    with pytest.raises(DataError, match="no ChatML tokens"):
        ChatMLFamily(FamilyOptions(), tokenizer)


def test_stop_tokens_are_the_end_of_a_turn_and_of_a_document(make: Make) -> None:
    assert make().stop_token_ids == {IM_END, 0}


# --- rows -------------------------------------------------------------------------------------------------------------


def test_the_default_system_prompt_is_written_once_in_the_first_turn(make: Make) -> None:
    family = make()
    row = [*family.render([USER]), *family.tokenizer.encode("a"), IM_END]
    row = family.merge(row, family.append([USER, ANSWER], [USER]))
    assert family.tokenizer.decode(row) == (
        "<|im_start|>system\nYou are nice.<|im_end|>\n<|im_start|>user\nu<|im_end|>\n"
        "<|im_start|>assistant\na<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "nice" not in family.tokenizer.decode(family.render([SYSTEM, USER]))


def test_the_newline_after_a_turn_is_inserted_exactly_once(make: Make) -> None:
    family = make()
    newline = family.tokenizer.encode("\n")
    once = [5, IM_END, *newline, 1]
    assert family.merge([5, IM_END], [1]) == once
    assert family.merge([5, IM_END, *newline], [1]) == once


@pytest.mark.parametrize("tail", [[9], [0], "newline"])
def test_a_turn_that_did_not_end_is_refused_by_default(make: Make, tail: object) -> None:
    family = make()
    row = [5, *(family.tokenizer.encode("\n") if tail == "newline" else tail)]  # type: ignore[misc]
    with pytest.raises(SessionError, match="does not end with"):
        family.merge(row, [1])


def test_a_turn_that_did_not_end_is_closed_untrained_when_the_run_says_so(make: Make) -> None:
    family = make(open_turn="close")
    assert family.merge([5, 9], [1]) == [5, 9, IM_END, *family.tokenizer.encode("\n"), 1]


def test_tools_a_template_hides_go_into_the_systems_turn_with_its_default(make: Make) -> None:
    family = make()
    text = family.tokenizer.decode(family.render([USER], [TOOL]))
    assert text.startswith("<|im_start|>system\nYou are nice.\n\nYou can call functions.")
    assert '{"type": "function", "function": {"name": "add", "parameters": {}}}' in text
    own = family.tokenizer.decode(family.render([SYSTEM, USER], [TOOL]))
    assert own.startswith("<|im_start|>system\nS\n\nYou can call functions.")


def test_calls_a_template_hides_are_written_verbatim(make: Make) -> None:
    family = make()
    block = '<tool_call>\n{"name": "add", "arguments": {"x":  1}}\n</tool_call>'
    assert block in family.tokenizer.decode(family.render([USER, SAID, USER]))
    assert block in family.tokenizer.decode(family.append([USER, ANSWER], [SAID, USER]))


def test_a_template_that_knows_tools_keeps_its_own_form(make: Make) -> None:
    family = make(HERMES)
    text = family.tokenizer.decode(family.render([USER, SAID, USER], [TOOL]))
    assert text.startswith("<|im_start|>system\nTools: [")
    assert '{"name": "add", "arguments": {"x": 1}}' in text


def test_a_spelling_of_calls_that_the_family_does_not_read_is_not_used(make: Make) -> None:
    family = make(SHOWS_TOOLS)
    text = family.tokenizer.decode(family.render([USER, SAID, USER]))
    assert '<tool_call>\n{"name": "add", "arguments": {"x":  1}}\n</tool_call>' in text


def test_tools_are_not_repeated_with_later_turns(make: Make) -> None:
    for template in (DEFAULT, SHOWS_TOOLS):
        family = make(template)
        suffix = family.append([USER, SAID], [Message(role="tool", content="r")], [TOOL])
        assert family.tokenizer.decode(suffix) == "<|im_start|>tool\nr<|im_end|>\n<|im_start|>assistant\n"


def test_a_named_family_writes_plain_chatml_over_a_template_that_rewrites_turns(make: Make) -> None:
    family = make(THINKS)
    text = family.tokenizer.decode(family.render([USER, ANSWER, USER]))
    assert (
        text
        == "".join(f"<|im_start|>{m.role}\n{m.content}<|im_end|>\n" for m in (USER, ANSWER, USER))
        + "<|im_start|>assistant\n"
    )


def test_calls_and_text_are_parsed_apart(make: Make) -> None:
    family = make()
    found = family.parse([*family.tokenizer.encode(spell_tool_calls("so", [CALL])), IM_END])
    assert found.content == "so"
    assert found.tool_calls == (ToolCall(id="call_0", name="add", arguments='{"x":  1}'),)


def test_thoughts_stay_in_the_content(make: Make) -> None:
    family = make()
    found = family.parse([*family.tokenizer.encode("<think>hm</think>4"), IM_END])
    assert (found.content, found.reasoning) == ("<think>hm</think>4", None)


@pytest.mark.parametrize("open_turn", ["refuse", "close"])
async def test_going_on_after_a_stop_string_trains_no_token_that_was_not_sampled(make: Make, open_turn: str) -> None:
    family = make(open_turn=open_turn)
    spelled = family.tokenizer.encode("Action: x")
    engine = ScriptedEngine([spelled, [*spelled, IM_END]])
    factory = SessionFactory([engine], family, strict, context_length=500)
    session = factory.open("s", SamplingParams(stop=("x",)))
    answer = await session.complete([USER])
    history = [USER, answer.message, Message(role="user", content="Observation: y")]
    if open_turn == "refuse":
        with pytest.raises(SessionError, match="open_turn: close"):
            await session.complete(history)
        return
    await session.complete(history)
    row = assemble(session, prompt_id="p")
    closing = int(np.flatnonzero(row.sampled)[len(spelled) - 1]) + 1
    assert row.token_ids[closing] == IM_END
    assert not row.sampled[closing]
    assert row.response_tokens == 2 * len(spelled) + 1
