"""TOML run-files: the standard library's parser, and the line of every key for error messages.

`tomllib` keeps no positions, so a scan of the text finds them. The scan never changes a value; at worst a key inside a
multi-line string gives a neighbouring line.
"""

from __future__ import annotations

import datetime
import re
import tomllib
from typing import Any

from miles_core.config.yaml12 import Document, Path, YamlError

_HEADER = re.compile(r"^\s*(\[\[|\[)\s*([^\]]+?)\s*\]{1,2}\s*(?:#.*)?$")
_KEY = re.compile(r"""^\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*=""")
_PART = re.compile(r"""[A-Za-z0-9_-]+|"[^"]*"|'[^']*'""")
_ERROR_LINE = re.compile(r"\(at line (\d+), column \d+\)")


def parse(text: str) -> Document:
    """Parse a TOML text.

    Raises:
        YamlError: the text is not TOML.
    """
    try:
        value = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        at = _ERROR_LINE.search(str(error))
        raise YamlError(_ERROR_LINE.sub("", str(error)).strip(), int(at.group(1)) if at else None) from error
    return Document(value=_plain(value), lines=_lines(text))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()  # as a YAML 1.2 file has it: text
    return value


def _lines(text: str) -> dict[Path, int]:
    lines: dict[Path, int] = {(): 1}
    prefix: Path = ()
    counts: dict[Path, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            prefix = _parts(header.group(2))
            if header.group(1) == "[[":
                counts[prefix] = counts.get(prefix, -1) + 1
                prefix = (*prefix, counts[prefix])
            elif prefix[:-1] in counts:  # [list.table] belongs to the newest item of [[list]]
                prefix = (*prefix[:-1], counts[prefix[:-1]], prefix[-1])
            _note(lines, prefix, number)
        elif key := _KEY.match(line):
            _note(lines, (*prefix, *_parts(key.group(1))), number)
    return lines


def _parts(dotted: str) -> Path:
    return tuple(part.strip("\"'") for part in _PART.findall(dotted))


def _note(lines: dict[Path, int], path: Path, number: int) -> None:
    for length in range(1, len(path) + 1):
        lines.setdefault(path[:length], number)
