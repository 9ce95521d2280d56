"""Raw rows of a JSONL file, a Parquet file or a folder saved by `datasets`, each with the place it came from.

What a row means is the business of `readers.py`. Nothing here imports `datasets`: its folders are Arrow streams with a
small JSON index, which pyarrow reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from miles_core.errors import DataError

Split = Literal["train", "eval"]
EVAL_NAMES = ("eval", "validation", "test")
"""Split folders that a held-out split may live in; more than one of them is ambiguous."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowProblem:
    """Why one row cannot be used."""

    where: str
    """``file:line`` for text, ``file:row`` for binary formats; both count from 1."""
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    where: str
    number: int
    """Line (JSONL) or row of the split (Parquet, Arrow), from 1."""
    values: Mapping[str, Any]
    typed: bool
    """The format has one type per column, so that keys a row does not have come back as None."""


def read_rows(path: Path, split: Split, columns: Sequence[str]) -> Iterator[Row | RowProblem]:
    """Yield every row of a dataset, or what is wrong with it, in file order.

    Args:
        path: A ``.jsonl``/``.json``/``.ndjson`` file, a ``.parquet`` file, or a folder saved with ``save_to_disk``.
        split: Which split to take when the folder holds several.
        columns: Columns to read; absent ones are no error here.

    Raises:
        DataError: the path is missing, of an unknown kind, or not readable as its kind at all.
    """
    if not path.exists():
        raise DataError("dataset does not exist", expected="a JSONL or Parquet file, or a folder", found=str(path))
    if path.is_dir():
        yield from _folder_rows(path, split, columns)
    elif path.suffix in (".jsonl", ".ndjson", ".json"):
        yield from _jsonl_rows(path)
    elif path.suffix in (".parquet", ".pq"):
        yield from _parquet_rows(path, columns)
    else:
        raise DataError(
            "unknown dataset format",
            expected=".jsonl, .ndjson, .json (one object a line), .parquet, .pq, or a folder saved by `datasets`",
            found=path.name,
            where=str(path),
        )


# --- JSON lines -------------------------------------------------------------------------------------------------------


def _jsonl_rows(path: Path) -> Iterator[Row | RowProblem]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            where = f"{path}:{number}"
            parsed = _parse_line(raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw)
            if parsed is None:
                continue
            if isinstance(parsed, str):
                yield RowProblem(where=where, message=parsed)
            else:
                yield Row(where=where, number=number, values=parsed, typed=False)


def _parse_line(raw: bytes) -> dict[str, Any] | str | None:
    """The object of a line, a message saying why there is none, or None for a blank line."""
    if not raw.strip():
        return None
    try:
        parsed = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        return f"not UTF-8 (byte {error.start})"
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg} (column {error.colno})"
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    if _half_character(parsed):
        return "half of a surrogate pair (\\ud800 to \\udfff) stands alone, which is no text"
    return parsed if isinstance(parsed, dict) else f"expected a JSON object, found {type(parsed).__name__}"


def _half_character(parsed: Any) -> bool:
    """JSON can escape half a character; no tokenizer, file or pipe takes it."""
    try:
        json.dumps(parsed, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


# --- Parquet and Arrow ------------------------------------------------------------------------------------------------


def _parquet_rows(path: Path, columns: Sequence[str]) -> Iterator[Row | RowProblem]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            present = [name for name in columns if name in file.schema_arrow.names]
            number = 0
            for batch in file.iter_batches(columns=present, batch_size=1024):
                yield from _batch_rows(batch, path, number)
                number += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise DataError("Parquet file cannot be read", found=str(error), where=str(path)) from error


def _folder_rows(folder: Path, split: Split, columns: Sequence[str]) -> Iterator[Row | RowProblem]:
    import pyarrow as pa

    chosen = _split_folder(folder, split)
    number = 0
    for file in _arrow_files(chosen):
        in_file = 0
        try:
            with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
                present = [name for name in columns if name in stream.schema.names]
                for batch in stream:
                    yield from _batch_rows(batch.select(present), file, in_file, number)
                    in_file += batch.num_rows
                    number += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise DataError("Arrow file cannot be read", found=str(error), where=str(file)) from error


def _batch_rows(batch: Any, path: Path, done_in_file: int, done: int | None = None) -> Iterator[Row | RowProblem]:
    done = done_in_file if done is None else done
    names = batch.schema.names
    decoders = [_json_decoder(field.type) for field in batch.schema]
    lists = [column.to_pylist() for column in batch.columns]
    for index in range(batch.num_rows):
        where = f"{path}:{done_in_file + index + 1}"
        try:
            values = {
                name: decode(column[index]) if decode else column[index]
                for name, column, decode in zip(names, lists, decoders, strict=True)
            }
        except ValueError as error:
            yield RowProblem(where=where, message=f"a JSON column holds no JSON: {error}")
        else:
            yield Row(where=where, number=done + index + 1, values=values, typed=True)


def _json_decoder(kind: Any) -> Callable[[Any], Any] | None:
    """Turn values of an Arrow type into plain ones where it holds JSON text (`arrow.json`), or None where not."""
    import pyarrow as pa

    if getattr(kind, "extension_name", None) == "arrow.json":
        return lambda text: None if text is None else json.loads(text, parse_constant=_refuse_constant)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        item = _json_decoder(kind.value_type)
        return item and (lambda values: None if values is None else [item(value) for value in values])
    if pa.types.is_struct(kind):
        inside = {field.name: decode for field in kind if (decode := _json_decoder(field.type))}
        if inside:
            return lambda values: (
                values and {name: inside[name](value) if name in inside else value for name, value in values.items()}
            )
    return None


def _split_folder(folder: Path, split: Split) -> Path:
    """The folder of one split: the folder itself, or the fitting one of a saved DatasetDict."""
    index = folder / "dataset_dict.json"
    if not index.exists():
        return folder
    splits = _read_json(index).get("splits", [])
    found = [name for name in (("train",) if split == "train" else EVAL_NAMES) if name in splits]
    if len(found) != 1:
        raise DataError(
            f"cannot tell which split is the {split} split",
            expected="a split called `train`" if split == "train" else f"exactly one of {', '.join(EVAL_NAMES)}",
            found=", ".join(splits) or "no split",
            where=str(folder),
            do=f"name the split's own folder, such as {folder}/{(found or splits or ['NAME'])[0]}",
        )
    return folder / found[0]


def _arrow_files(folder: Path) -> list[Path]:
    index = folder / "state.json"
    if not index.exists():
        raise DataError(
            "folder is not a saved dataset",
            expected="state.json or dataset_dict.json, as `Dataset.save_to_disk` writes them",
            found=", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "an empty folder",
            where=str(folder),
        )
    state = _read_json(index)
    if state.get("_indices_data_files"):
        raise DataError(
            "dataset was saved with an indices mapping, which is not read",
            where=str(folder),
            do="call `flatten_indices()` before `save_to_disk`",
        )
    try:
        names = [entry["filename"] for entry in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise DataError("state.json lists no data files", where=str(index)) from error
    for name in names:
        # The index is data: it must not lead out of its folder.
        if not isinstance(name, str) or Path(name).name != name:
            raise DataError("data file outside its folder", found=repr(name), where=str(index))
    return [folder / name for name in names]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError("dataset index cannot be read", found=str(error), where=str(path)) from error
    if not isinstance(parsed, dict):
        raise DataError("dataset index is not a JSON object", found=type(parsed).__name__, where=str(path))
    return parsed
