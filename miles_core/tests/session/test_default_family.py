from __future__ import annotations

from pathlib import Path

import pytest

from miles_core.errors import DataError, SessionError
from miles_core.session.default_family import DefaultFamily
from miles_core.session.hermes import spell_tool_calls
from miles_core.testing.tiny import IM_END, write_tiny_tokenizer
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Message, ToolCall

USER, ANSWER = Message(role="user", content="u"), Message(role="assistant", content="a")
CALL = ToolCall(id="c", name="add", arguments='{"x": 1}')
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}

TURN = "'<|im_start|>' + m.role + '\\n' + m.content"
OPENER = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"


def tokenizer_with(folder: Path, template: str) -> ChatTokenizer:
    write_tiny_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return ChatTokenizer.from_dir(folder)


def two_turns(family: DefaultFamily, stop: int, *appended: Message) -> tuple[list[int], list[int]]:
    """The row built turn by turn, and the row rendered at once."""
    row = [*family.render([USER]), *family.tokenizer.encode(ANSWER.content), stop]
    return family.merge(row, family.append([USER, ANSWER], appended)), family.render([USER, ANSWER, *appended])


def test_a_default_system_prompt_is_written_in_the_first_turn_only(tmp_path: Path) -> None:
    default = "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nhello<|im_end|>\\n' }}{% endif %}"
    template = default + "{% for m in messages %}{{ " + TURN + " + '<|im_end|>\\n' }}{% endfor %}" + OPENER
    family = DefaultFamily(None, tokenizer_with(tmp_path, template))
    grown, rendered = two_turns(family, IM_END, USER)
    assert grown == rendered
    assert family.tokenizer.decode(grown).count("hello") == 1


def test_bos_is_written_once(tmp_path: Path) -> None:
    template = "{{ '<|endoftext|>' }}{% for m in messages %}{{ " + TURN + " + '<|im_end|>' }}{% endfor %}"
    family = DefaultFamily(None, tokenizer_with(tmp_path, template + OPENER))
    grown, rendered = two_turns(family, IM_END, USER)
    assert grown == rendered
    assert grown.count(0) == 1


def test_a_stop_token_that_opens_the_next_turn_stands_once(tmp_path: Path) -> None:
    # No token closes a turn; the model samples the opener of the next one.
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<|endoftext|>' + m.content }}"
        "{% else %}{{ '<|im_start|>' + m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
    )
    family = DefaultFamily(None, tokenizer_with(tmp_path, template))
    assert family.stop_token_ids == {0, IM_END}
    grown, rendered = two_turns(family, 0, USER)
    assert grown == rendered


THINKING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}{{ '<think></think>' }}{% endif %}"
    "{{ m.content + '<|im_end|>\\n' }}{% endfor %}"
)


def test_a_template_that_drops_thoughts_of_old_turns_still_appends_tool_results(tmp_path: Path) -> None:
    family = DefaultFamily(None, tokenizer_with(tmp_path, THINKING + OPENER))
    suffix = family.append([USER, ANSWER], [Message(role="tool", content="r")])
    assert family.tokenizer.decode(suffix).startswith("<|im_start|>tool\nr<|im_end|>")


def test_a_template_that_rewrites_earlier_turns_is_refused_with_both_rows(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ messages | length ~ m.content + '<|im_end|>' }}{% endfor %}" + OPENER
    family = DefaultFamily(None, tokenizer_with(tmp_path, template))
    with pytest.raises(SessionError, match="not append-only") as caught:
        family.append([USER, ANSWER], [USER])
    text = str(caught.value)
    assert "expected: from token 0: [" in text
    assert "found:    from token 0: [" in text


def test_a_seam_within_a_token_is_refused(tmp_path: Path) -> None:
    # As text this template only appends; as tokens "t" and "h" merge across the seam.
    template = "{% for m in messages %}{{ 'h' + m.content + 't' }}{% endfor %}" + OPENER
    family = DefaultFamily(None, tokenizer_with(tmp_path, template))
    with pytest.raises(SessionError, match="not append-only"):
        family.append([USER, ANSWER], [USER])


def test_roles_the_template_refuses_keep_its_reason(tmp_path: Path) -> None:
    check = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    template = check + "{{ " + TURN + " + '<|im_end|>\\n' }}{% endfor %}" + OPENER
    family = DefaultFamily(None, tokenizer_with(tmp_path, template))
    with pytest.raises(SessionError, match="no tools here"):
        family.append([USER, ANSWER], [Message(role="tool", content="r")])


def test_a_template_without_any_end_of_turn_needs_an_eos_token(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, "{% for m in messages %}{{ m.content }}\n{% endfor %}")
    tokenizer.special_tokens = {}
    with pytest.raises(DataError, match="nothing tells where"):
        DefaultFamily(None, tokenizer)


def test_a_template_that_hides_answers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not show what an assistant said"):
        DefaultFamily(None, tokenizer_with(tmp_path, "x"))


def test_a_turn_ending_in_what_follows_the_stop_token_is_not_taken_for_closed(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    family = DefaultFamily(None, ChatTokenizer.from_dir(tmp_path))
    newline = family.tokenizer.encode("\n")
    with pytest.raises(SessionError, match="has no end"):
        family.merge([*family.render([USER]), *newline], [1])


def test_tools_and_calls_a_template_hides_are_written_as_text(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    family = DefaultFamily(None, ChatTokenizer.from_dir(tmp_path))
    said = Message(role="assistant", content="so", tool_calls=(CALL,))
    text = family.tokenizer.decode(family.render([USER, said, USER], [TOOL]))
    assert text.startswith("<|im_start|>system\nYou can call functions.")
    assert spell_tool_calls("so", [CALL]) in text
    assert '"x": 1' in family.tokenizer.decode(family.append([USER, said], [said, USER], [TOOL]))


def test_tools_and_calls_a_template_shows_are_left_to_it(tmp_path: Path) -> None:
    template = (
        "{{ tools | tojson }}{% for m in messages %}{{ " + TURN + " }}"
        "{% for c in m.tool_calls or [] %}{{ '#' + c.function.name + (c.function.arguments | tojson) }}{% endfor %}"
        "{{ '<|im_end|>\\n' }}{% endfor %}" + OPENER
    )
    family = DefaultFamily(None, tokenizer_with(tmp_path, template))
    said = Message(role="assistant", content="so", tool_calls=(CALL,))
    text = family.tokenizer.decode(family.render([USER, said, USER], [TOOL]))
    assert "You can call functions" not in text
    assert '#add{"x": 1}' in text
