from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.errors import DataError
from miles_core.testing.tiny import IM_END, IM_START, MARKER_TOKENS, write_tiny_tokenizer
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Message


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> ChatTokenizer:
    return ChatTokenizer.from_dir(folder)


def rewrite(folder: Path, name: str, **changes: object) -> None:
    found = json.loads((folder / name).read_text(encoding="utf-8"))
    (folder / name).write_text(json.dumps({**found, **changes}), encoding="utf-8")


def test_special_text_becomes_its_token_or_stays_text(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.encode("<|im_end|>") == [IM_END]
    plain = tokenizer.encode("<|im_end|>", allow_special=False)
    assert IM_END not in plain
    assert tokenizer.decode(plain) == "<|im_end|>"


def test_no_token_is_added_even_if_the_post_processor_would(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    bos = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    rewrite(
        tmp_path,
        "tokenizer.json",
        post_processor={
            "type": "TemplateProcessing",
            "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [IM_START], "tokens": ["<|im_start|>"]}},
        },
    )
    assert IM_START not in ChatTokenizer.from_dir(tmp_path).encode("hi")


def test_a_stored_truncation_or_padding_never_changes_a_row(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    plain = ChatTokenizer.from_dir(tmp_path).encode("abcdefgh")
    rewrite(
        tmp_path,
        "tokenizer.json",
        truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 32},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 2,
            "pad_type_id": 0,
            "pad_token": "<|im_end|>",
        },
    )
    assert ChatTokenizer.from_dir(tmp_path).encode("abcdefgh") == plain


def test_decoding_keeps_special_tokens_unless_told(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode("a<|im_end|>b")
    assert tokenizer.decode(ids) == "a<|im_end|>b"
    assert tokenizer.decode(ids, skip_special=True) == "ab"


def test_vocabulary_facts(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.special_ids == {0, IM_START, IM_END}
    assert (tokenizer.bos_id, tokenizer.eos_id) == (IM_START, IM_END)
    assert tokenizer.token_id("<think>") == 3 + MARKER_TOKENS.index("<think>")
    assert tokenizer.token_id("no such token") is None
    assert tokenizer.token(10**6) is None
    assert tokenizer.token(IM_END) == "<|im_end|>"
    assert tokenizer.vocab_size == 275


def test_a_template_file_wins_over_the_config(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("file")
    assert ChatTokenizer.from_dir(tmp_path).render([Message(role="user")], add_generation_prompt=True) == "file"


def test_a_checkpoint_may_bring_a_template_for_tools(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    rewrite(tmp_path, "tokenizer_config.json", chat_template=named)
    tokenizer = ChatTokenizer.from_dir(tmp_path)
    messages = [Message(role="user")]
    assert tokenizer.render(messages, add_generation_prompt=True) == "plain"
    assert tokenizer.render(messages, [{"type": "function"}], add_generation_prompt=True) == "1 tools"


def test_several_templates_without_a_default_are_an_error(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    rewrite(tmp_path, "tokenizer_config.json", chat_template=[{"name": "rag", "template": "x"}])
    with pytest.raises(DataError, match="none is the default"):
        ChatTokenizer.from_dir(tmp_path)


def test_special_tokens_may_be_objects_or_in_the_old_file(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    rewrite(tmp_path, "tokenizer_config.json", eos_token={"content": "<|im_end|>", "lstrip": False}, bos_token=None)
    (tmp_path / "special_tokens_map.json").write_text('{"unk_token": "<|endoftext|>", "eos_token": "ignored"}')
    tokenizer = ChatTokenizer.from_dir(tmp_path)
    assert tokenizer.special_tokens == {
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }
    assert tokenizer.bos_id is None


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.json", None, "no fast tokenizer"),
        ("tokenizer.json", "{}", "tokenizer.json is unreadable"),
        ("tokenizer_config.json", None, "no chat template"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", "[]", "not a JSON object"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', "not valid Jinja"),
    ],
)
def test_a_missing_or_broken_file_is_named(
    folder: Path, tmp_path: Path, name: str, content: str | None, says: str
) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / name).unlink()
    if content is not None:
        (copy / name).write_text(content)
    with pytest.raises(DataError, match=says) as caught:
        ChatTokenizer.from_dir(copy)
    assert str(copy) in str(caught.value)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="missing folder"):
        ChatTokenizer.from_dir(tmp_path / "nowhere")


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_streamed_text_is_the_text_of_the_whole_row(tokenizer: ChatTokenizer, data: st.DataObject) -> None:
    text = data.draw(st.text(st.characters(exclude_categories=("Cs",)), max_size=12))
    noise = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    ids = data.draw(st.permutations([*tokenizer.encode(text), *noise]) | st.just([*noise, *tokenizer.encode(text)]))
    stream, pieces, at = tokenizer.text_stream(), [], 0
    while at < len(ids):
        step = data.draw(st.integers(1, 3))
        pieces.append(stream.push(ids[at : at + step]))
        at += step
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)


def test_no_piece_of_a_stream_ends_within_a_character(tokenizer: ChatTokenizer) -> None:
    text = "né 中文 👩‍👩‍👧!"
    stream = tokenizer.text_stream()
    pieces = [stream.push([index]) for index in tokenizer.encode(text)]
    assert not any("�" in piece for piece in pieces)
    assert "".join(pieces) == text
    assert stream.flush() == ""


def test_a_stream_of_bytes_that_are_no_text_costs_no_more_per_token_the_longer_it_is(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    decode = ChatTokenizer.decode

    def counted(self: ChatTokenizer, ids: list[int]) -> str:
        decoded.append(len(ids))
        return decode(self, ids)

    monkeypatch.setattr(ChatTokenizer, "decode", counted)
    lead, *_ = tokenizer.encode("é")
    for ids in ([lead] * 600, tokenizer.encode("�" * 200), tokenizer.encode("�é🙂" * 100)[1:]):
        decoded.clear()
        stream = tokenizer.text_stream()
        text = "".join(stream.push([index]) for index in ids) + stream.flush()
        assert max(decoded) < 50
        assert text == tokenizer.decode(ids)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_long_row_of_broken_characters_streams_as_it_decodes(tokenizer: ChatTokenizer, data: st.DataObject) -> None:
    pool = tokenizer.encode("é€🙂�a")
    ids = data.draw(st.lists(st.sampled_from(pool), min_size=40, max_size=120))
    stream = tokenizer.text_stream()
    assert "".join(stream.push([index]) for index in ids) + stream.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("file", "content", "word"),
    [
        ("chat_template.jinja", b"\xff\xfe", "not UTF-8"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}', "is not one"),
        ("tokenizer_config.json", b'{"chat_template": ["x"]}', "is not one"),
        ("tokenizer_config.json", b'{"eos_token": {"x": 1}}', "no content"),
    ],
)
def test_a_damaged_folder_is_refused_with_a_reason(file: str, content: bytes, word: str, tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(DataError, match=word):
        ChatTokenizer.from_dir(tmp_path)


@pytest.mark.parametrize(
    "source", ["{{ 1/0 }}", "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "{{ range(1000000) | list }}"]
)
def test_whatever_a_template_raises_is_its_refusal(source: str, tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(source)
    with pytest.raises(DataError, match="refused the conversation"):
        ChatTokenizer.from_dir(tmp_path).render([], add_generation_prompt=True)
