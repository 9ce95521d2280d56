"""Tool-call arguments as JSON text, member by member, to the character.

A call's arguments are a JSON object in the text of a `ToolCall`. Some models write that text, others one tagged value
after another. Both directions keep the exact characters of a value where the spelling has room for them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from miles_core.types import Tool

_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()
_PYTHON_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
"""Templates write Python's words for values that are no text; models learn either spelling."""


class Unfinished(ValueError):
    """The text stops inside a value: more text may complete it."""


def members(text: str) -> dict[str, str]:
    """Key -> exact source text of its value, for one JSON object.

    Raises:
        Unfinished: the text stops within the object.
        ValueError: not one well-formed object with distinct keys.
    """
    found: dict[str, str] = {}
    at = _skip(text, _expect(text, _skip(text, 0), "{"))
    while text[at : at + 1] != "}":
        if found:
            at = _skip(text, _expect(text, at, ","))
        key, at = _value(text, at)
        if not isinstance(key, str) or key in found:
            raise ValueError("not a distinct key")
        start = _skip(text, _expect(text, _skip(text, at), ":"))
        _, at = _value(text, start)
        found[key] = text[start:at]
        at = _skip(text, at)
    if _skip(text, at + 1) != len(text):
        raise ValueError("text after the object")
    return found


def joined(parts: Mapping[str, str]) -> str:
    """The inverse of `members`, on one line."""
    return "{" + ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in parts.items()) + "}"


def shown_members(arguments: str) -> dict[str, str]:
    """Members of a call's arguments; none where they are empty or no JSON object."""
    try:
        return members(arguments or "{}")
    except (ValueError, RecursionError):
        return {}


def bare(value: str, *, python: bool) -> str:
    """A value as tagged spellings show it: strings without quotes, everything else as JSON.

    Args:
        value: JSON text.
        python: Write true, false and null as Python does, as templates with ``| string`` do.
    """
    if value.startswith('"'):
        return str(json.loads(value))
    if value[:1] in "{[":
        return json.dumps(json.loads(value), ensure_ascii=False)
    return {"true": "True", "false": "False", "null": "None"}.get(value, value) if python else value


def typed(text: str, schema: Any) -> str:
    """A bare value as JSON text: what the tool's schema says it is, else the JSON it spells, else a string.

    Args:
        schema: JSON schema of the value, or None when the tool declares none.
    """
    allowed = _types(schema)
    word = _PYTHON_WORDS.get(text.strip().lower())
    if "string" in allowed and not (word == "null" and "null" in allowed):
        return json.dumps(text, ensure_ascii=False)
    if word is not None:
        return word
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if isinstance(value, str) or value != value or value in (float("inf"), float("-inf")):
        return json.dumps(text, ensure_ascii=False)
    return text.strip()


def properties(tools: Sequence[Tool], name: str) -> Mapping[str, Any]:
    """Argument -> JSON schema, for the tool called `name`; empty when no such tool is declared."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            found = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return found if isinstance(found, Mapping) else {}
    return {}


def _types(schema: Any) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return frozenset()
    named = schema.get("type")
    found = {named} if isinstance(named, str) else set(named) if isinstance(named, list) else set()
    for choice in ("anyOf", "oneOf"):
        listed = schema.get(choice)
        for option in listed if isinstance(listed, list) else ():
            found |= _types(option)
    if not found and isinstance(schema.get("enum"), list) and all(isinstance(item, str) for item in schema["enum"]):
        found = {"string"}
    return frozenset(str(name) for name in found)


def _value(text: str, at: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string") or error.pos >= len(text.rstrip()):
            raise Unfinished(error.msg) from error
        raise


def _skip(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


def _expect(text: str, at: int, char: str) -> int:
    if at >= len(text):
        raise Unfinished(f"expected {char!r} at the end")
    if text[at] != char:
        raise ValueError(f"expected {char!r} at {at}")
    return at + 1
