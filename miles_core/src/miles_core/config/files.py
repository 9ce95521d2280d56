"""Whether the files a run-file names are there: model folder and data. Their contents are read when the run starts."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from miles_core.config.checks import Found
from miles_core.config.model_folder import ModelFolderError, read_model_folder
from miles_core.config.spec import RunSpec
from miles_core.user_function import absent_import, start_above, where_paths_start

DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".pq")
"""Kinds of file that hold prompts; a folder is one that `datasets` saved."""


@dataclass(frozen=True, slots=True)
class FileCheck:
    """For the documentation; the functions below find them, and `driver.first_look` the last two."""

    id: str
    about: str


FILE_CHECKS = (
    FileCheck("MIL701", "The model is a folder with config.json and safetensors weights."),
    FileCheck("MIL702", "The model folder holds tokenizer.json and a chat template."),
    FileCheck("MIL703", "Data is a JSONL or Parquet file with something in it, or a folder saved by `datasets`."),
    FileCheck("MIL704", "The held-out split is not the training file."),
    FileCheck("MIL705", "What a function of the run-file imports is installed."),
    FileCheck("MIL706", "The first rows of data hold prompts; `miles validate` and `miles train` look at them."),
    FileCheck("MIL707", "The token family can write for the model's tokenizer; both commands open it."),
)

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""Such as ``HuggingFaceTB/SmolLM2-135M-Instruct``."""


def absolute(text: str) -> Path:
    """A path of the run-file: `~` is expanded, and a relative one starts where the command was started."""
    path = Path(text)
    with contextlib.suppress(RuntimeError):  # the home of a user who does not exist; then `~` is a name like others
        path = path.expanduser()
    return path.absolute()


def check_files(spec: RunSpec) -> Iterator[Found]:
    """Every file that is missing or plainly of the wrong kind."""
    yield from _attempt(check_model, "model.path", spec.model.path)
    if spec.data is not None:
        yield from _attempt(_check_data, "data.train", spec.data.train)
        if spec.data.eval is not None:
            yield from _attempt(_check_data, "data.eval", spec.data.eval)
            if absolute(spec.data.eval) == absolute(spec.data.train):
                yield _found(
                    "MIL704", "data.eval", "it is the training file itself", "name a file the run never trains on"
                )


def check_imports(functions: Iterable[tuple[str, str]]) -> Iterator[Found]:
    """Every function whose module cannot be imported here, as far as that is certain without running it.

    Args:
        functions: (path in the run-file, what `registry.load_target` takes)
    """
    for path, target in functions:
        if absent := absent_import(target):
            do = "install it for the Python that runs miles; a function in a file is written file.py:function"
            yield replace(_found("MIL705", path, absent, do), show=False)


def _attempt(check: Callable[[str, str], Iterator[Found]], path: str, text: str) -> list[Found]:
    """The findings of a check; a name that the file system cannot even look up is one too."""
    try:
        return list(check(path, text))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return [
            _found("MIL701" if path == "model.path" else "MIL703", path, f"cannot be looked up: {reason}", "correct it")
        ]


def _found(id: str, path: str, message: str, do: str) -> Found:
    return Found(id=id, path=path, message=message, do=do, reads=(path,))


def check_model(path: str, text: str) -> Iterator[Found]:
    """Whether `text`, found at `path`, names a folder that a run can train."""
    folder = absolute(text)
    do = (
        "give the path of a Hugging Face folder, relative to where you start miles; "
        "nothing is downloaded from the Hub: `hf download NAME --local-dir FOLDER` does that"
    )
    if not folder.is_dir():
        reason = "is no folder" if folder.exists() else "does not exist"
        if start_above(text):
            do = where_paths_start(text)
        elif not folder.parent.exists() and _HUB_NAME.fullmatch(text):
            place = f"models/{text.partition('/')[2]}"
            do = (
                f"nothing is downloaded from the Hub; if this is a name there, "
                f"`hf download {text} --local-dir {place}` gets the folder, and the model is {place}"
            )
        yield _found("MIL701", path, f"{folder} {reason}", do)
        return
    try:
        read_model_folder(folder)
    except ModelFolderError as error:
        yield _found("MIL701", path, f"{folder}: {error}", do)
        return
    if not (folder / "tokenizer.json").is_file():
        yield _found(
            "MIL702",
            path,
            f"{folder}: tokenizer.json is missing",
            "save the tokenizer with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)",
        )
    elif not _has_chat_template(folder):
        yield _found(
            "MIL702",
            path,
            f"{folder}: the tokenizer has no chat template",
            "use an instruction-tuned checkpoint, or put its chat_template.jinja into the folder",
        )


def _has_chat_template(folder: Path) -> bool:
    if any(
        (folder / name).exists() for name in ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    ):
        return True
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and bool(config.get("chat_template"))


def _check_data(path: str, text: str) -> Iterator[Found]:
    place = absolute(text)
    do = "give a .jsonl or .parquet file, or a folder saved by `datasets`"
    if not place.exists():
        yield _found("MIL703", path, f"{place} does not exist", f"{do}; {where_paths_start(text)}")
    elif place.is_file() and place.suffix not in DATA_SUFFIXES:
        yield _found("MIL703", path, f"a file ending in `{place.suffix}` is neither JSONL nor Parquet", do)
    elif place.is_file() and place.stat().st_size == 0:
        yield _found("MIL703", path, f"{place} is empty", "fill it: one JSON object a line")
    elif place.is_dir() and not any(place.iterdir()):
        yield _found("MIL703", path, f"{place} is an empty folder", do)
    elif not place.is_file() and not place.is_dir():
        yield _found("MIL703", path, f"{place} is neither a file nor a folder, and cannot be read twice", do)
