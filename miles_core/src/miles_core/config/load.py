"""Reads a run-file and its `--set` overrides into one plain tree that knows where each value was written.

Nothing here knows what is installed: `resolve` turns a `Source` into a typed run, or into a list of what is wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from miles_core.capability import KINDS
from miles_core.config import toml, yaml12
from miles_core.config.picks import SECTIONS, default_pick, kind_at, short_key
from miles_core.config.problems import Problem, RunFileError

KeyPath = yaml12.Path
_LISTS = {section for kind, section in SECTIONS.items() if KINDS[kind].many}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was written: a line of the file, or the number of a ``--set``."""

    source: str
    line: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A run-file as it was given, with overrides applied, but not validated yet."""

    path: Path | None
    text: str
    """The file's text, unchanged."""
    overrides: tuple[str, ...] = ()
    tree: dict[str, Any] = field(default_factory=dict)
    """dict, list, str, int, float, bool and None only."""
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    """What could not be read: repeated keys, tags, malformed overrides. `resolve` reports it together with everything
    else."""

    @property
    def name(self) -> str:
        return self.path.name if self.path else "run-file"

    def origin(self, path: KeyPath) -> Origin:
        """Where the value at `path` was written, or else the nearest section above it."""
        for length in range(len(path), 0, -1):
            if found := self.origins.get(path[:length]):
                return found
        return Origin(self.name)

    def has(self, path: KeyPath) -> bool:
        """Whether a value is written at `path`, perhaps inside a mapping that an override set as a whole."""
        tree: Any = self.tree
        for part in path:
            if not isinstance(tree, dict) or part not in tree:
                return False
            tree = tree[part]
        return True

    def disabled_plugins(self) -> tuple[str, ...]:
        """`plugins.disable`, if it is a list of texts. It is read before the registry exists."""
        section = self.tree.get("plugins")
        names = section.get("disable") if isinstance(section, dict) else None
        return tuple(name for name in names if isinstance(name, str)) if isinstance(names, list) else ()

    def as_given(self) -> str:
        """The file's text and the overrides, for the record in the run directory."""
        notes = "".join(f"# --set {override}\n" for override in self.overrides)
        return self.text if not notes else f"{self.text.rstrip()}\n\n# Overrides of this run:\n{notes}"


def dotted(path: KeyPath) -> str:
    """Spell a path as users write it: ``rewards.0.weight``."""
    return ".".join(str(part) for part in path)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Source:
    """Read a YAML or TOML run-file and apply ``a.b=value`` overrides in order.

    Raises:
        RunFileError: the file is absent, unreadable, or not YAML (TOML).
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        do = "write one with `miles init`" if isinstance(error, FileNotFoundError) else None
        problem = Problem(message=f"the run-file cannot be read: {reason}", source=str(path), do=do)
        raise RunFileError([problem]) from error
    return parse(text, overrides, path=path)


def parse(text: str, overrides: Sequence[str] = (), *, path: Path | None = None) -> Source:
    """`load` for a text at hand. A path ending in ``.toml`` makes it TOML.

    Raises:
        RunFileError: the text is not YAML (TOML).
    """
    source = Source(path=path, text=text, overrides=tuple(overrides))
    reader = toml if path is not None and path.suffix == ".toml" else yaml12
    try:
        document = reader.parse(text)
    except yaml12.YamlError as error:
        language = "TOML" if reader is toml else "YAML"
        raise RunFileError(
            [Problem(message=f"not {language}: {error.message}", source=source.name, line=error.line)]
        ) from error
    problems = [
        Problem(path=dotted(key), message=reason, source=source.name, line=line)
        for key, line, reason in document.refused
    ]
    tree = document.value if document.value is not None else {}
    if not isinstance(tree, dict):
        problems.append(Problem(message="a run-file is a mapping of sections", source=source.name, line=1))
        tree = {}
    origins = {key: Origin(source.name, line) for key, line in document.lines.items()}
    source = replace(source, tree=copy.deepcopy(tree), origins=origins, problems=tuple(problems))
    for number, override in enumerate(overrides, start=1):
        source = _apply(source, override, f"--set #{number}")
    return source


def _apply(source: Source, override: str, label: str) -> Source:
    """The source with one more override. A malformed one becomes a problem and changes nothing."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        return _refuse(source, label, f"`{override}` is not of the form `section.key=value`")
    try:
        document = yaml12.parse(text)
    except yaml12.YamlError as error:
        return _refuse(source, label, f"the value `{text}` is not YAML: {error.message}", key)
    if document.refused:
        return _refuse(source, label, document.refused[0][2], key)
    tree = copy.deepcopy(source.tree)
    try:
        path = _put(tree, parts, document.value)
    except _NoSuchPlaceError as error:
        return _refuse(source, label, str(error), key)
    # The new value replaces the old one whole, so its old lines go with it.
    origins = {known: origin for known, origin in source.origins.items() if known[: len(path)] != path}
    origins[path] = Origin(label)
    return replace(source, tree=tree, origins=origins)


class _NoSuchPlaceError(Exception):
    """An override names a place that the file cannot have."""


def _put(tree: dict[str, Any], parts: Sequence[str], value: Any) -> KeyPath:
    """Set `value` at `parts` in place, and make missing sections on the way. Returns the path, with list indices as
    numbers."""
    path: KeyPath = ()
    at: Any = tree
    for part in parts[:-1]:
        key = _key(at, part, path)
        path = (*path, key)
        at = _enter(at, key, path)
    key = _key(at, parts[-1], path)
    if isinstance(at, list) and key == len(at):
        at.append(value)
    else:
        at[key] = value
    return (*path, key)


def _key(at: Any, part: str, path: KeyPath) -> str | int:
    if not isinstance(at, list):
        return part
    if not part.isdecimal() or int(part) > len(at):
        raise _NoSuchPlaceError(f"`{dotted(path)}` is a list; `{part}` is not an index from 0 to {len(at)}")
    return int(part)


def _enter(at: Any, key: str | int, path: KeyPath) -> Any:
    """The container at `key`. It is made if it is absent, and a short form becomes the mapping that it stands for."""
    if isinstance(at, list):
        if key == len(at):
            at.append(None)
        found = at[int(key)]
    else:
        found = at.get(key)
    if found is None:
        kind = kind_at(path)
        default = default_pick(kind) if kind and not KINDS[kind].many else None
        found = [] if path in _LISTS else {"use": default} if default else {}
    elif isinstance(found, str) and (short := short_key(path)):
        found = {short: found}
    if not isinstance(found, dict | list):
        raise _NoSuchPlaceError(f"`{dotted(path)}` is the single value {found!r} and has nothing inside")
    at[key] = found
    return found


def _refuse(source: Source, label: str, message: str, path: str = "") -> Source:
    problem = Problem(path=path, message=message, source=label, do="--set section.key=value, with the value as YAML")
    return replace(source, problems=(*source.problems, problem))
