from __future__ import annotations

import datetime

import pytest

from miles_core.chat_template import ChatTemplate, template_message
from miles_core.errors import DataError
from miles_core.types import Message, ToolCall

USER = Message(role="user", content="hi")


def render(source: str, *messages: Message, today: datetime.date | None = None, **kwargs: object) -> str:
    template = ChatTemplate(source, variables={"bos_token": "<s>"}, today=today)
    return template.render(messages or (USER,), add_generation_prompt=False, **kwargs)


def test_blocks_take_their_line_and_indentation_with_them() -> None:
    assert render("a\n    {% if true %}\nb\n    {% endif %}\nc") == "a\nb\nc"


def test_loops_may_break_and_continue() -> None:
    source = (
        "{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}"
    )
    assert render(source + "{% endfor %}") == "02"


def test_tojson_escapes_neither_html_nor_unicode() -> None:
    assert render("{{ value | tojson }}", value={"k": "<é>&'"}) == '{"k": "<é>&\'"}'


def test_tojson_takes_indent_separators_and_sorting() -> None:
    source = "{{ v | tojson(separators=(',', ':'), sort_keys=true) }}|{{ v | tojson(indent=1) }}"
    assert render(source, v={"b": 1, "a": 2}) == '{"a":2,"b":1}|{\n "b": 1,\n "a": 2\n}'


def test_special_tokens_are_variables_and_arguments_win_over_them() -> None:
    assert render("{{ bos_token }}") == "<s>"
    assert render("{{ bos_token }}", bos_token="x") == "x"


def test_generation_blocks_pass_their_body_through_in_their_own_scope() -> None:
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}[{{ x }}]{% endgeneration %}{{ x }}"
    assert render(source) == "[2]1"


def test_a_template_that_refuses_is_a_data_error_with_its_reason_and_the_roles() -> None:
    with pytest.raises(DataError, match="only users please") as caught:
        render("{{ raise_exception('only users please') }}", Message(role="tool", content="x"))
    assert "'tool'" in str(caught.value)


def test_adding_text_to_nothing_is_a_data_error() -> None:
    with pytest.raises(DataError, match="TypeError"):
        render("{{ 'a' + none }}")


def test_broken_jinja_names_its_line() -> None:
    with pytest.raises(DataError, match="line 2"):
        ChatTemplate("ok\n{% if %}")


def test_the_sandbox_keeps_templates_off_python_internals() -> None:
    with pytest.raises(DataError, match="unsafe"):
        render("{{ ''.__class__.__mro__[1].__subclasses__() }}")


def test_templates_cannot_change_the_messages() -> None:
    with pytest.raises(DataError, match="unsafe"):
        render("{{ messages.append(1) }}")


def test_todays_date_is_refused_unless_it_is_fixed() -> None:
    source = "{{ strftime_now('%Y-%m-%d') }}"
    with pytest.raises(DataError, match="fixed `today`"):
        render(source)
    assert render(source, today=datetime.date(2024, 2, 29)) == "2024-02-29"


def test_a_template_that_asks_for_the_clock_falls_back_to_its_own_constant() -> None:
    assert render("{{ strftime_now('%Y') if strftime_now is defined else 'never' }}") == "never"


def test_call_arguments_become_objects_only_where_they_are_objects() -> None:
    def arguments(text: str) -> object:
        call = ToolCall(id="c", name="f", arguments=text)
        return template_message(Message(role="assistant", tool_calls=(call,)))["tool_calls"][0]["function"]["arguments"]

    assert arguments('{"a": 1}') == {"a": 1}
    assert arguments("") == {}
    assert arguments("[1]") == "[1]"
    assert arguments('{"a": ') == '{"a": '


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in [[1, 1]] recursive %}{{ loop([a, a]) if loop.depth0 < 60 }}{% endfor %}",
    ],
)
def test_a_template_that_never_ends_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles_core.chat_template.LIMIT_S", 0.05)
    with pytest.raises(DataError, match=r"it was not done after 0\.05 s"):
        ChatTemplate(source).render([USER], add_generation_prompt=True)


def test_absent_fields_are_absent_so_that_is_defined_is_false() -> None:
    assert template_message(USER) == {"role": "user", "content": "hi"}


def test_tools_without_a_json_form_are_refused() -> None:
    template = ChatTemplate("{{ tools }}")
    with pytest.raises(DataError, match="JSON form"):
        template.render([USER], [{"function": object()}], add_generation_prompt=False)
