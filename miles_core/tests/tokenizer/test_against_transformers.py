"""The oracle: whatever `AutoTokenizer` and `apply_chat_template` say of a folder, `ChatTokenizer` says too."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.chat_template import template_message
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Message, ToolCall

TEMPLATES = {
    "trims": """
        {%- if tools %}
            {{- '[tools]' }}
            {%- for tool in tools %}
                {{- '\\n' + (tool | tojson) }}
            {%- endfor %}
        {%- endif %}
        {%- for message in messages %}
            {%- if message.role == 'tool' and loop.first %}{% continue %}{% endif %}
            {{- bos_token + message.role + '\\n' + message.content | trim + eos_token + '\\n' }}
            {%- for call in message.tool_calls or [] %}
                {{- call.function.name + (call.function.arguments | tojson) }}
            {%- endfor %}
        {%- endfor %}
        {%- if add_generation_prompt %}{{ bos_token + 'assistant\\n' }}{% endif %}""",
    "blocks": """{% for m in messages %}
    {% if m.reasoning_content is defined %}
<think>{{ m.reasoning_content }}</think>
    {% endif %}
  {% generation %}
{{ m['content'] }}{% endgeneration %}

{% endfor %}
{{ tools is none }} {{ unk_token }} {{ namespace(a=1).a }} {{ dict(b=2) }}""",
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "description": "<b> & é", "parameters": {"type": "object", "properties": {"a": {}}}},
}
CALL = ToolCall(id="c", name="add", arguments='{"b": "é<&>", "a": 1.50}')
CONVERSATIONS = {
    "user": [Message(role="user", content=" Hi <b>&'\"\n\n ")],
    "turns": [
        Message(role="system", content="S"),
        Message(role="user", content="u"),
        Message(role="assistant", content="a\n", reasoning="r"),
        Message(role="user", content="again <|im_end|>"),
    ],
    "tools": [
        Message(role="user", content="1+1"),
        Message(role="assistant", tool_calls=(CALL,)),
        Message(role="tool", content="2", tool_call_id="c", name="add"),
    ],
}


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("template", [None, *TEMPLATES])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["bare", "tools"])
@pytest.mark.parametrize("opener", [True, False])
def test_conversations_render_to_the_same_ids(
    folder: Path,
    tmp_path: Path,
    reference: Any,
    template: str | None,
    conversation: str,
    tools: list[Any],
    opener: bool,
) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    if template is not None:
        (copy / "chat_template.jinja").write_text(TEMPLATES[template], encoding="utf-8")
    ours = ChatTokenizer.from_dir(copy)
    messages = CONVERSATIONS[conversation]
    arguments: dict[str, Any] = {
        "tools": tools or None,
        "chat_template": None if template is None else TEMPLATES[template],
        "add_generation_prompt": opener,
    }
    plain = [template_message(message) for message in messages]
    text = ours.render(messages, tools, add_generation_prompt=opener)
    assert text == reference.apply_chat_template(plain, tokenize=False, **arguments)
    assert ours.encode(text) == reference.apply_chat_template(plain, return_dict=False, **arguments)


@given(text=st.text(st.characters(exclude_categories=("Cs",)), max_size=40))
@settings(max_examples=50, deadline=None)
def test_text_encodes_and_decodes_the_same(folder: Path, reference: Any, text: str) -> None:
    ours = ChatTokenizer.from_dir(folder)
    ids = ours.encode(text + "<|im_end|> <think>")
    assert ids == reference.encode(text + "<|im_end|> <think>", add_special_tokens=False)
    assert ours.decode(ids) == reference.decode(ids)
    assert ours.decode(ids, skip_special=True) == reference.decode(ids, skip_special_tokens=True)
    assert ours.encode(text, allow_special=False) == reference.encode(
        text, add_special_tokens=False, split_special_tokens=True
    )


def test_the_same_tokens_are_special(folder: Path, reference: Any) -> None:
    ours = ChatTokenizer.from_dir(folder)
    assert ours.special_tokens == reference.special_tokens_map
    assert ours.special_ids == set(reference.all_special_ids) | {0}
    assert ours.vocab_size == len(reference)
