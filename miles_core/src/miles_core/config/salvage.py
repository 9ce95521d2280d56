"""What is left of a run-file without its wrong values, so that the rest can be checked all the same. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from miles_core.config.load import KeyPath
from miles_core.config.picks import kind_at

_PLACEHOLDERS: dict[KeyPath, Any] = {
    ("name",): "unnamed",
    ("model",): ".",
    ("model", "path"): ".",
    ("data", "train"): ".",
    ("schedule",): {"steps": 1},
    ("schedule", "steps"): 1,
}
"""Stand in for required keys while the rest is checked; their paths count as broken."""
_GONE = object()


def without(tree: Any, gone: set[KeyPath], path: KeyPath = ()) -> Any:
    """A copy of the tree without the paths in `gone`, with placeholders for required values."""
    if isinstance(tree, list):
        return [_item(item, gone, (*path, index)) for index, item in enumerate(tree)]
    if not isinstance(tree, dict):
        return tree
    keys = dict.fromkeys([*tree, *(str(lost[-1]) for lost in gone if lost[:-1] == path and lost in _PLACEHOLDERS)])
    kept = {key: _item(tree.get(key), gone, (*path, key)) for key in keys}
    return {key: item for key, item in kept.items() if item is not _GONE}


def left(tree: dict[str, Any], gone: Collection[KeyPath]) -> dict[str, Any]:
    """The tree without sections and keys of sections that nothing reads, required ones filled in."""
    kept = {
        name: {key: item for key, item in value.items() if (name, key) not in gone}
        if isinstance(value, dict)
        else value
        for name, value in tree.items()
        if (name,) not in gone
    }
    return kept | {str(path[0]): value for path, value in _PLACEHOLDERS.items() if len(path) == 1 and path in gone}


def _item(value: Any, gone: set[KeyPath], path: KeyPath) -> Any:
    if path not in gone:
        return without(value, gone, path)
    if kind_at(path):
        return {"use": "?"}
    return _PLACEHOLDERS.get(path, _GONE)


def whole(path: KeyPath) -> KeyPath:
    """The smallest part around a wrong value that can be taken out without moving anything else."""
    for length in range(1, len(path) + 1):
        if kind_at(path[:length]):
            return path[:length]
        if isinstance(path[length - 1], int) and not kind_at(path[:length]):
            return path[: length - 1]
    return path
