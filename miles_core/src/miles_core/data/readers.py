"""Dataset rows to prompts: what each column means, and every unusable row with its line."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from miles_core.data.rows import Row, RowProblem, Split, read_rows
from miles_core.errors import DataError
from miles_core.types import Message, Prompt, Tool, ToolCall

SHOWN_PROBLEMS = 20
"""Rows an error names; the count says how many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The column of each part of a prompt."""

    prompt: str = "prompt"
    label: str = "label"
    tools: str = "tools"
    metadata: str = "metadata"
    system: str | None = None
    """System message put before prompts that have none."""
    named: frozenset[str] = field(default_factory=frozenset)
    """Columns that somebody asked for by name: one that no row has is an error, not an absent option."""


def read_prompts(
    path: str | Path,
    *,
    columns: Columns | None = None,
    split: Split = "train",
    bad_rows: Literal["stop", "skip"] = "stop",
    first: int | None = None,
) -> tuple[tuple[Prompt, ...], tuple[RowProblem, ...]]:
    """Read a whole dataset, or its first rows.

    A prompt's id is ``<file or folder name>:<line or row>``: it does not change if the file is moved to another folder.

    Args:
        path: JSONL or Parquet file, or folder saved by Hugging Face `datasets`.
        columns: Names of the columns.
        split: Split to take from a folder that holds several.
        bad_rows: ``stop`` raises on any unusable row, ``skip`` leaves it out and reports it.
        first: Rows read at most, to see whether they are usable; nothing is said of a dataset that others may save.

    Returns:
        The prompts in file order, and the problems of the rows left out.

    Raises:
        DataError: unusable rows under ``stop`` (all are named), no usable row at all, or an unreadable file.
    """
    columns = columns or Columns()
    path = Path(path)
    prompts: list[Prompt] = []
    problems: list[RowProblem] = []
    seen: set[str] = set()
    wanted = (columns.prompt, columns.label, columns.tools, columns.metadata)
    rows = read_rows(path, split, wanted)
    typed = False
    for row in itertools.islice(rows, first):
        if isinstance(row, RowProblem):
            problems.append(row)
            continue
        seen.update(row.values)
        typed = row.typed
        try:
            prompts.append(_prompt(row, columns, source=path.name))
        except _BadRow as bad:
            problems.append(RowProblem(where=row.where, message=str(bad)))
    more = first is not None and next(rows, None) is not None
    if problems and (bad_rows == "stop" or not (prompts or more)):
        raise _rows_error(path, len(prompts), problems, more=more)
    if not (prompts or more):
        raise DataError("dataset is empty", expected="at least one row", found="none", where=str(path))
    for name in sorted(columns.named - seen) if typed or not more else ():
        raise DataError(
            f"no row has the column {name!r}",
            found=", ".join(sorted(seen)),
            where=str(path),
            do="correct the column name under `data`, or leave the option out",
        )
    return tuple(prompts), tuple(problems)


def _rows_error(path: Path, good: int, problems: Sequence[RowProblem], *, more: bool) -> DataError:
    shown = [str(problem) for problem in problems[:SHOWN_PROBLEMS]]
    if len(problems) > SHOWN_PROBLEMS:
        shown.append(f"… and {len(problems) - SHOWN_PROBLEMS} more")
    do = (
        "correct the rows, or set data.bad_rows: skip"
        if good or more
        else "correct the rows, or name their columns under `data`; none is usable"
    )
    return DataError(
        f"{len(problems)} of {'the first ' if more else ''}{good + len(problems)} rows cannot be used",
        found="\n            ".join(shown),
        where=str(path),
        do=do,
    )


class _BadRow(Exception):
    """Why a row is no prompt."""


def _prompt(row: Row, columns: Columns, *, source: str) -> Prompt:
    values = row.values
    if columns.prompt not in values:
        others = "" if row.typed else f"; there are {', '.join(sorted(values)) or 'none'}"
        raise _BadRow(f"column {columns.prompt!r} is missing{others}")
    messages = _messages(values[columns.prompt], columns.prompt)
    if columns.system is not None and messages[0].role != "system":
        messages = (Message(role="system", content=columns.system), *messages)
    return Prompt(
        id=f"{source}:{row.number}",
        messages=messages,
        tools=_tools(values.get(columns.tools), columns.tools, typed=row.typed),
        label=_json_value(values.get(columns.label), columns.label),
        metadata=_metadata(values.get(columns.metadata), columns.metadata),
    )


def _messages(raw: Any, name: str) -> tuple[Message, ...]:
    if raw is None:
        raise _BadRow(f"column {name!r} is empty")
    if isinstance(raw, str):
        if not raw.strip():
            raise _BadRow(f"{name!r} is an empty text")
        return (Message(role="user", content=raw),)
    if not isinstance(raw, list):
        raise _BadRow(f"{name!r} must be text or a list of messages, found {type(raw).__name__}")
    if not raw:
        raise _BadRow(f"{name!r} is an empty list of messages")
    messages = tuple(_message(item, f"{name}[{index}]") for index, item in enumerate(raw))
    if messages[-1].role not in ("user", "tool"):
        raise _BadRow(f"{name!r} must end with a user or tool message, found {messages[-1].role!r}")
    return messages


_MESSAGE_KEYS = frozenset({"role", "content", "reasoning", "reasoning_content", "tool_calls", "tool_call_id", "name"})
_ROLES = ("system", "developer", "user", "assistant", "tool")


def _message(raw: Any, at: str) -> Message:
    if not isinstance(raw, Mapping):
        raise _BadRow(f"{at} must be a mapping with role and content, found {type(raw).__name__}")
    given = {key: value for key, value in raw.items() if value is not None}
    unknown = sorted(set(given) - _MESSAGE_KEYS)
    if unknown:
        raise _BadRow(f"{at} has the unknown key {unknown[0]!r}; known: {', '.join(sorted(_MESSAGE_KEYS))}")
    role = given.get("role")
    if role not in _ROLES:
        raise _BadRow(f"{at}.role must be one of {', '.join(_ROLES)}, found {role!r}")
    calls = given.get("tool_calls", [])
    if not isinstance(calls, list):
        raise _BadRow(f"{at}.tool_calls must be a list, found {type(calls).__name__}")
    return Message(
        role=role,
        content=_text(given.get("content", ""), f"{at}.content"),
        reasoning=_optional_text(given.get("reasoning", given.get("reasoning_content")), f"{at}.reasoning"),
        tool_calls=tuple(_tool_call(call, f"{at}.tool_calls[{index}]") for index, call in enumerate(calls)),
        tool_call_id=_optional_text(given.get("tool_call_id"), f"{at}.tool_call_id"),
        name=_optional_text(given.get("name"), f"{at}.name"),
    )


def _text(raw: Any, at: str) -> str:
    """Text, or text parts in the OpenAI shape joined; anything else would be lost silently."""
    if isinstance(raw, str):
        return raw
    if isinstance(raw, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in raw):
        return "".join(_text(part.get("text"), f"{at}.text") for part in raw)
    raise _BadRow(f"{at} must be text or a list of text parts, found {type(raw).__name__}")


def _optional_text(raw: Any, at: str) -> str | None:
    if raw is None or isinstance(raw, str):
        return raw
    raise _BadRow(f"{at} must be text, found {type(raw).__name__}")


def _tool_call(raw: Any, at: str) -> ToolCall:
    function = raw.get("function") if isinstance(raw, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _BadRow(f"{at} must look like {{id, function: {{name, arguments}}}}")
    arguments = function.get("arguments", "{}")
    text = arguments if isinstance(arguments, str) else json.dumps(_without_nulls(arguments), ensure_ascii=False)
    return ToolCall(id=str(raw.get("id") or ""), name=function["name"], arguments=text)


def _tools(raw: Any, name: str, *, typed: bool) -> tuple[Tool, ...]:
    """Tools as a list, or as the JSON text of one (which columnar formats need for mixed schemas)."""
    raw = _parsed(raw, name)
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise _BadRow(f"{name!r} must be a list of tools, found {type(raw).__name__}")
    tools = _without_nulls(raw) if typed else raw
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if (
            not isinstance(function, Mapping)
            or not isinstance(function.get("name"), str)
            or tool.get("type") != "function"
        ):
            raise _BadRow(f"{name}[{index}] must look like {{type: function, function: {{name, parameters}}}}")
    return tuple(_json_value(tools, name))


def _metadata(raw: Any, name: str) -> Mapping[str, Any]:
    raw = _parsed(raw, name)
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise _BadRow(f"{name!r} must be a mapping, found {type(raw).__name__}")
    checked: Mapping[str, Any] = _json_value(raw, name)
    return checked


def _parsed(raw: Any, name: str) -> Any:
    if not isinstance(raw, str):
        return raw
    try:
        return json.loads(raw)
    except ValueError as error:
        raise _BadRow(f"{name!r} is text but not JSON: {error}") from error


def _json_value(raw: Any, name: str) -> Any:
    try:
        json.dumps(raw, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise _BadRow(f"{name!r} holds a value JSON cannot express: {error}") from error
    return raw


def _without_nulls(raw: Any) -> Any:
    """Drop the keys that a columnar format added because another row has them."""
    if isinstance(raw, Mapping):
        return {key: _without_nulls(value) for key, value in raw.items() if value is not None}
    return [_without_nulls(item) for item in raw] if isinstance(raw, list) else raw
