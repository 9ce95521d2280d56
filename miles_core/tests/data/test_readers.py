"""Dataset readers: what each format yields, and every bad row with its place."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from miles_core.data.readers import Columns, read_prompts
from miles_core.errors import DataError
from miles_core.types import Message, ToolCall

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_text_becomes_one_user_message(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "d.jsonl", {"prompt": "2 + 2 = ?", "label": 4, "metadata": {"level": [1, None]}})
    prompts, problems = read_prompts(path)
    assert problems == ()
    assert prompts[0].messages == (Message(role="user", content="2 + 2 = ?"),)
    assert (prompts[0].label, prompts[0].metadata, prompts[0].tools) == (4, {"level": [1, None]}, ())


def test_messages_tools_and_tool_calls_are_read_whole(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "add "}, {"type": "text", "text": "it"}]},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
    ]
    prompts, _ = read_prompts(jsonl(tmp_path / "d.jsonl", {"prompt": messages, "tools": [TOOL]}))
    assert prompts[0].messages == (
        Message(role="user", content="add it"),
        Message(role="assistant", reasoning="hm", tool_calls=(ToolCall(id="c1", name="add", arguments='{"a": 1}'),)),
        Message(role="tool", content="1", tool_call_id="c1"),
    )
    assert prompts[0].tools == (TOOL,)


def test_system_message_is_added_only_where_there_is_none(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "b"}]
    path = jsonl(tmp_path / "d.jsonl", {"prompt": "a"}, {"prompt": own})
    prompts, _ = read_prompts(path, columns=Columns(system="be brief"))
    assert [prompt.messages[0].content for prompt in prompts] == ["be brief", "own"]
    assert [len(prompt.messages) for prompt in prompts] == [2, 2]


def test_ids_are_the_lines_wherever_the_file_lies(tmp_path: Path) -> None:
    text = '{"prompt": "a"}\n\n{"prompt": "b"}\n'
    (tmp_path / "x").mkdir()
    for folder in (tmp_path, tmp_path / "x"):
        (folder / "d.jsonl").write_text(text)
    here, there = (read_prompts(folder / "d.jsonl")[0] for folder in (tmp_path, tmp_path / "x"))
    assert [prompt.id for prompt in here] == ["d.jsonl:1", "d.jsonl:3"] == [prompt.id for prompt in there]


BAD_ROWS: dict[str, tuple[Any, str]] = {
    "not json": ('{"prompt": ', "not JSON"),
    "not an object": ("[1]", "JSON object"),
    "nan": ('{"prompt": "a", "label": NaN}', "NaN is not a JSON value"),
    "half a character": ({"prompt": "a\ud800"}, "surrogate pair"),
    "half a character in JSON text": ({"prompt": "a", "metadata": '{"x": "\\ud800"}'}, "surrogates not allowed"),
    "no prompt": ({"question": "a"}, "'prompt' is missing"),
    "null prompt": ({"prompt": None}, "'prompt' is empty"),
    "blank prompt": ({"prompt": "  "}, "empty text"),
    "number": ({"prompt": 3}, "found int"),
    "no messages": ({"prompt": []}, "empty list"),
    "bad role": ({"prompt": [{"role": "robot", "content": "a"}]}, r"prompt\[0\].role"),
    "unknown key": ({"prompt": [{"role": "user", "content": "a", "weight": 1}]}, "unknown key 'weight'"),
    "image": ({"prompt": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text parts"),
    "ends with the answer": ({"prompt": [{"role": "assistant", "content": "a"}]}, "must end with a user or tool"),
    "metadata": ({"prompt": "a", "metadata": [1]}, "must be a mapping"),
    "tools": ({"prompt": "a", "tools": [{"name": "add"}]}, r"tools\[0\]"),
    "bad call": (
        {"prompt": [{"role": "assistant", "tool_calls": [{"name": "f"}]}, {"role": "user", "content": "a"}]},
        "tool_calls",
    ),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named_with_its_line(tmp_path: Path, name: str) -> None:
    row, message = BAD_ROWS[name]
    path = jsonl(tmp_path / "d.jsonl", {"prompt": "good"}, row, {"prompt": "good"})
    with pytest.raises(DataError, match=message) as raised:
        read_prompts(path)
    assert f"{path}:2: " in str(raised.value)
    prompts, problems = read_prompts(path, bad_rows="skip")
    assert [prompt.id for prompt in prompts] == ["d.jsonl:1", "d.jsonl:3"]
    assert [problem.where for problem in problems] == [f"{path}:2"]


def test_all_bad_rows_are_reported_together(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "d.jsonl", {"prompt": "a"}, *[{"prompt": ""}] * 30)
    with pytest.raises(DataError) as raised:
        read_prompts(path)
    assert "30 of 31 rows" in str(raised.value)
    assert f"{path}:2: " in str(raised.value)
    assert "and 10 more" in str(raised.value)


def test_bytes_that_are_not_utf8_are_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "\xff"}\n')
    prompts, problems = read_prompts(path, bad_rows="skip")
    assert len(prompts) == 1
    assert "not UTF-8" in problems[0].message


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_dataset_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "d.jsonl").write_text(content)
    with pytest.raises(DataError, match="empty"):
        read_prompts(tmp_path / "d.jsonl", bad_rows="skip")


def test_a_dataset_of_bad_rows_only_is_an_error_even_when_skipping(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none is usable"):
        read_prompts(jsonl(tmp_path / "d.jsonl", {"prompt": ""}), bad_rows="skip")


def test_a_column_asked_for_by_name_must_exist(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "d.jsonl", {"prompt": "a", "answer": 1})
    assert read_prompts(path, columns=Columns(label="answer", named=frozenset({"answer"})))[0][0].label == 1
    with pytest.raises(DataError, match="no row has the column 'anwser'"):
        read_prompts(path, columns=Columns(label="anwser", named=frozenset({"anwser"})))


def test_missing_and_unknown_files_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        read_prompts(tmp_path / "none.jsonl")
    (tmp_path / "d.csv").write_text("prompt\na\n")
    with pytest.raises(DataError, match="unknown dataset format"):
        read_prompts(tmp_path / "d.csv")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="not a saved dataset"):
        read_prompts(tmp_path / "folder")


def test_parquet_gives_the_same_prompts_as_jsonl(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "a", "name": "x"}], "label": "1", "tools": json.dumps([TOOL])},
        {
            "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "b"}],
            "label": None,
            "tools": None,
        },
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    from_parquet, _ = read_prompts(tmp_path / "d.parquet")
    from_lines, _ = read_prompts(jsonl(tmp_path / "d.jsonl", *rows))
    assert [(p.messages, p.label, p.tools) for p in from_parquet] == [
        (p.messages, p.label, p.tools) for p in from_lines
    ]
    assert [prompt.id for prompt in from_parquet] == ["d.parquet:1", "d.parquet:2"]


def test_parquet_bad_rows_are_named_over_row_groups(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([{"prompt": "" if index == 1500 else "a"} for index in range(2000)])
    pq.write_table(table, tmp_path / "d.parquet", row_group_size=700)
    prompts, problems = read_prompts(tmp_path / "d.parquet", bad_rows="skip")
    assert len(prompts) == 1999
    assert problems[0].where == f"{tmp_path / 'd.parquet'}:1501"
    assert prompts[-1].id == "d.parquet:2000"


def test_a_broken_parquet_file_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "d.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(DataError, match="cannot be read"):
        read_prompts(tmp_path / "d.parquet")


# --- folders saved by Hugging Face `datasets`; the library is the oracle ---


ROWS = [
    {
        "prompt": [{"role": "user", "content": f"question {i}"}],
        "label": f"{i}",
        "metadata": {"level": i, "tags": ["a", "b"]},
        "tools": json.dumps([TOOL]),
    }
    for i in range(25)
]


def save(dataset: Any, folder: Path, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset.save_to_disk(str(folder), **options)


def test_a_saved_dataset_reads_like_the_real_library(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    # A selection that was shuffled: what is saved must be the selected rows in the shuffled order.
    dataset = datasets.Dataset.from_list(ROWS).shuffle(seed=5).select(range(20))
    save(dataset, tmp_path / "saved", num_shards=3)
    prompts, _ = read_prompts(tmp_path / "saved")
    loaded = datasets.load_from_disk(str(tmp_path / "saved"))
    assert [prompt.messages[0].content for prompt in prompts] == [row["prompt"][0]["content"] for row in loaded]
    assert [(prompt.label, prompt.metadata) for prompt in prompts] == [
        (row["label"], row["metadata"]) for row in loaded
    ]
    assert [prompt.id for prompt in prompts] == [f"saved:{number}" for number in range(1, 21)]
    assert prompts[0].tools == (TOOL,)


def test_json_columns_are_decoded_as_the_real_library_does(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    if not hasattr(datasets, "Json"):
        pytest.skip("this release of datasets has no Json feature")
    features = datasets.Features(
        {"prompt": datasets.List(datasets.Json()), "label": datasets.Json(), "metadata": datasets.Json()}
    )
    rows = [
        {"prompt": [{"role": "user", "content": "a"}], "label": "4", "metadata": {"x": 1}},
        {"prompt": [{"role": "user", "content": "b"}], "label": 4, "metadata": {"y": [2]}},
    ]
    save(datasets.Dataset.from_list(rows, features=features), tmp_path / "saved")
    prompts, _ = read_prompts(tmp_path / "saved")
    loaded = datasets.load_from_disk(str(tmp_path / "saved"))
    assert [[{"role": m.role, "content": m.content} for m in p.messages] for p in prompts] == loaded["prompt"][:]
    assert [(prompt.label, prompt.metadata) for prompt in prompts] == [
        (row["label"], row["metadata"]) for row in loaded
    ]
    assert [prompt.metadata for prompt in prompts] == [{"x": 1}, {"y": [2]}]


def test_a_saved_dataset_dict_is_read_by_split(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    both = datasets.DatasetDict(
        train=datasets.Dataset.from_list(ROWS[:3]), validation=datasets.Dataset.from_list(ROWS[3:5])
    )
    save(both, tmp_path / "saved")
    train, _ = read_prompts(tmp_path / "saved", split="train")
    held_out, _ = read_prompts(tmp_path / "saved", split="eval")
    assert [prompt.label for prompt in train] == ["0", "1", "2"]
    assert [prompt.label for prompt in held_out] == ["3", "4"]
    assert [prompt.label for prompt in read_prompts(tmp_path / "saved" / "validation")[0]] == ["3", "4"]


def folder(path: Path, **state: Any) -> Path:
    path.mkdir()
    (path / "state.json").write_text(json.dumps(state))
    return path


def test_an_ambiguous_held_out_split_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test", "validation"]}))
    with pytest.raises(DataError, match="cannot tell which split") as raised:
        read_prompts(tmp_path, split="eval")
    assert f"{tmp_path}/validation" in str(raised.value)


def test_an_index_may_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="outside its folder"):
        read_prompts(folder(tmp_path / "d", _data_files=[{"filename": "../secret.arrow"}]))


def test_an_indices_mapping_is_refused_rather_than_ignored(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="indices mapping"):
        read_prompts(folder(tmp_path / "d", _data_files=[], _indices_data_files=[{"filename": "i.arrow"}]))
