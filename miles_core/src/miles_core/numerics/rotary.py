"""Which rotary embedding a config.json asks for, whether it can be computed, and for how long it stays one table.

Plain data over the standard library: validation reads it before torch is there. The rules are those of transformers'
`modeling_rope_utils`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_NUMBERS = {"linear": ("factor",), "dynamic": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
"""What these types cannot be computed without."""
_LISTS = ("short_factor", "long_factor")
"""Of longrope, a number for each pair of rotated dimensions."""


def rope_type(config: Mapping[str, Any]) -> str:
    """The type of rotary embedding that transformers reads from a config.json, under the names of older files too.

    What is no mapping is returned as it is, so it is no type that anybody knows; so are parameters per layer type.
    """
    rope = _said(config)
    if not isinstance(rope, Mapping):
        return str(rope)
    if any(isinstance(each, Mapping) for each in rope.values()):
        return "one per layer type"
    return _type(rope)


def unreadable(config: Mapping[str, Any]) -> str | None:
    """Why no rotary embedding can be computed from a config.json, or None."""
    rope = _said(config)
    if not isinstance(rope, Mapping):
        return f"rope_scaling or rope_parameters is {rope!r}, not an object"
    for each in _tables(config):
        kind = _type(each)
        numbers = [*_NUMBERS.get(kind, ()), *(name for name in ("rope_theta",) if name in each)]
        if wrong := [name for name in numbers if not _is_number(each.get(name))]:
            return f"rope_type {kind} needs a number as {wrong[0]}, not {each.get(wrong[0])!r}"
        if kind == "yarn" and ("factor" not in each or not (each["factor"] is None or _is_number(each["factor"]))):
            return f"rope_type yarn needs a number as factor, not {each.get('factor')!r}"
        if kind == "longrope":
            for name in _LISTS:
                values = each.get(name)
                if not isinstance(values, list) or not all(map(_is_number, values)):
                    return f"rope_type longrope needs a list of numbers as {name}, not {values!r}"
    return None


def steady_tokens(config: Mapping[str, Any]) -> int | None:
    """Tokens of a sequence up to which every position is rotated alike, whatever is computed beside it; or None.

    ``max_position_embeddings``, for most. `dynamic` makes another table beyond it. `longrope` does so beyond the length
    of its first training, for every row of a batch in which one is longer, and for keys that are cached already.
    """
    longest = config.get("max_position_embeddings")
    for each in _tables(config):
        if _type(each) == "longrope":
            name = "original_max_position_embeddings"
            longest = config.get(name) or each.get(name) or longest
    return longest if isinstance(longest, int) else None


def _said(config: Mapping[str, Any]) -> Any:
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    # Phi-3 wrote longrope under two other names, which transformers still reads as what they mean.
    if config.get("model_type") == "phi3" and isinstance(rope, Mapping) and _type(rope) in ("su", "yarn"):
        return {**rope, "rope_type": "longrope"}
    return rope


def _tables(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The parameters of each table: one, or one for each type of layer."""
    rope = _said(config)
    if isinstance(rope, Mapping):
        nested = [each for each in rope.values() if isinstance(each, Mapping)]
        yield from nested or [rope]


def _type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
