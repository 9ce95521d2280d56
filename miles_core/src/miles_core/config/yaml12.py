"""YAML 1.2 core schema over PyYAML's composer: plain values, the line of every key, and no surprises.

PyYAML speaks YAML 1.1, where `1e-6` is text, `on` is true, `12:30:00` is 45000 and a repeated key silently wins. Here
numbers are numbers, only true and false are booleans, repeated keys are problems, and tags build no objects.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

Path = tuple[str | int, ...]
"""Keys and list indices from the root to a value."""

MAX_NODES = 50_000
"""Values in one document at most; aliases of aliases would otherwise expand without end."""
MAX_DEPTH = 64
"""Levels of nesting at most; a run-file has four."""

_STR, _NULL, _BOOL, _INT, _FLOAT = (f"tag:yaml.org,2002:{name}" for name in ("str", "null", "bool", "int", "float"))
_SCALARS = (
    (_NULL, re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    (_BOOL, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    (_INT, re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"), list("-+0123456789")),
    (
        _FLOAT,
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        list("-+0123456789."),
    ),
)


class Yaml12Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2 (yaml.org/spec/1.2.2, section 10.3.2)."""


class Yaml12Dumper(yaml.SafeDumper):
    """Writes plain scalars exactly where `Yaml12Loader` reads them back as the same value."""


Yaml12Loader.yaml_implicit_resolvers = {}
Yaml12Dumper.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in _SCALARS:
    Yaml12Loader.add_implicit_resolver(_tag, _pattern, _first)
    Yaml12Dumper.add_implicit_resolver(_tag, _pattern, _first)
_LEGACY = [
    pattern
    for resolvers in yaml.SafeDumper.yaml_implicit_resolvers.values()
    for _, pattern in resolvers
    if hasattr(pattern, "match")
]
"""Plain texts that YAML 1.1 reads as something else: `on`, dates, `12:30`."""


def _represent_text(dumper: Yaml12Dumper, text: str) -> yaml.ScalarNode:
    if not text.isprintable():
        style = '"'  # PyYAML's single quotes fold unusual line ends into spaces
    elif text in ("y", "Y", "n", "N") or any(pattern.match(text) for pattern in _LEGACY):
        style = "'"  # for readers of YAML 1.1
    else:
        style = None
    return dumper.represent_scalar(_STR, text, style=style)


Yaml12Dumper.add_representer(str, _represent_text)


class YamlError(Exception):
    """The text is not YAML (TOML). `line` is 1-based, or None."""

    def __init__(self, message: str, line: int | None) -> None:
        super().__init__(message)
        self.message = message
        self.line = line


@dataclass(slots=True)
class Document:
    """A parsed text: plain values (dict, list, str, int, float, bool, None), lines, and what was refused on the way."""

    value: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    """1-based line of each key or list item."""
    refused: list[tuple[Path, int, str]] = field(default_factory=list)
    """Path, line and reason of each repeated key, non-text key or tag."""


def parse(text: str) -> Document:
    """Parse one YAML document.

    Raises:
        YamlError: the text is not YAML, holds several documents, or expands beyond `MAX_NODES` values.
    """
    try:
        node = yaml.compose(text, Loader=Yaml12Loader)
    except yaml.MarkedYAMLError as error:
        # What was left open says more than where the text ended.
        mark = error.context_mark or error.problem_mark
        message = ", ".join(part for part in (error.context, error.problem) if part)
        raise YamlError(message or "not YAML", mark.line + 1 if mark else None) from error
    except yaml.YAMLError as error:
        raise YamlError(str(error), None) from error
    except RecursionError as error:
        raise YamlError(f"values are nested more than {MAX_DEPTH} levels deep", None) from error
    document = Document()
    if node is not None:
        document.value = _Builder(document).build(node, (), ())
    return document


class _Builder:
    def __init__(self, document: Document) -> None:
        self.document = document
        self.seen = 0

    def build(self, node: yaml.Node, path: Path, parents: tuple[int, ...]) -> Any:
        line = node.start_mark.line + 1
        self.document.lines.setdefault(path, line)
        self.seen += 1
        if id(node) in parents:
            raise YamlError("an alias refers to a value that contains it", line)
        if self.seen > MAX_NODES:
            raise YamlError(f"aliases expand to more than {MAX_NODES} values", line)
        if len(path) > MAX_DEPTH:
            raise YamlError(f"values are nested more than {MAX_DEPTH} levels deep", line)
        inside = (*parents, id(node))
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return self._mapping(node, path, inside)
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            return [self.build(item, (*path, index), inside) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path, line)
        self.document.refused.append((path, line, f"the tag `{node.tag}` is not supported; write plain values"))
        return None

    def _mapping(self, node: yaml.MappingNode, path: Path, inside: tuple[int, ...]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self.document.refused.append((path, line, "a key must be text"))
                continue
            key = str(key_node.value)
            here = (*path, key)
            if key in result:
                self.document.refused.append((here, line, f"is written twice; the first is on line {first[key]}"))
                continue
            first[key] = line
            self.document.lines[here] = line
            result[key] = self.build(value_node, here, inside)
        return result

    def _scalar(self, node: yaml.ScalarNode, path: Path, line: int) -> Any:
        text = str(node.value)
        if node.tag == _STR:
            return text
        if node.tag == _NULL:
            return None
        if node.tag == _BOOL and text.lower() in ("true", "false"):
            return text.lower() == "true"
        try:
            if node.tag == _INT:
                return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
            if node.tag == _FLOAT:
                return float(re.sub(r"(?i)\.(?=inf|nan)", "", text))
        except ValueError:
            pass  # an explicit tag on text that is not of its type; refused below
        self.document.refused.append((path, line, f"the tag `{node.tag}` does not fit `{text}`"))
        return None


def dump(value: Any) -> str:
    """Text that `parse` reads back as the same value; keys keep their order, null is written."""
    return yaml.dump(
        value, Dumper=Yaml12Dumper, sort_keys=False, allow_unicode=True, width=110, default_flow_style=False
    )
