"""Pydantic's errors as problems: the key as the user wrote it, the value found, what is possible instead."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from miles_core.config import picks, yaml12
from miles_core.config.load import KeyPath, Source, dotted
from miles_core.config.problems import Problem
from miles_core.config.spec import RunSpec
from miles_core.guesses import KEYS, closest, plain

Model = TypeVar("Model", bound=BaseModel)


@dataclass(slots=True)
class Parsed:
    """What a model made of raw values: the object, or the problems and the paths they are at."""

    model: Any = None
    problems: list[Problem] = field(default_factory=list)
    broken: list[KeyPath] = field(default_factory=list)


def show(value: Any) -> str:
    """A value as one would write it in the file, cut to one short line."""
    is_scalar = not isinstance(value, dict | list)
    text = yaml12.dump(value).removesuffix("\n...\n") if is_scalar else json.dumps(value, ensure_ascii=False)
    text = " ".join(text.split())
    return text if len(text) <= 40 else text[:37] + "..."


def strict(model: type[Model], raw: Mapping[str, Any]) -> Model:
    """Validate plain values without guessing: no text for numbers, no numbers for true and false.

    JSON mode is what gives this: strict, and yet a list may become a tuple.

    Raises:
        pydantic.ValidationError
    """
    return model.model_validate_json(json.dumps(raw), strict=True)


def read(
    model: type[BaseModel], raw: Mapping[str, Any], source: Source, base: KeyPath = (), *, owner: str | None = None
) -> Parsed:
    """Validate the raw values found at `base` of the run-file; never raises for anything a user can write."""
    try:
        return Parsed(strict(model, raw))
    except ValidationError as error:
        parsed = Parsed()
        for detail in error.errors(include_url=False, include_context=True):
            where = base + _existing(raw, tuple(detail["loc"]), detail["type"])
            origin = source.origin(where)
            problem = _problem(model, detail, raw, where, base)
            problem["owner"] = owner
            parsed.problems.append(Problem(source=origin.source, line=origin.line, **problem))
            parsed.broken.append(where)
        return parsed


def read_options(
    model: type[BaseModel] | None, raw: Mapping[str, Any], source: Source, base: KeyPath, *, owner: str
) -> Parsed:
    """Validate a pick's own options against the capability's model; without a model it takes none."""
    if model is None:
        model = NoOptions
    try:
        parsed = read(model, raw, source, base, owner=owner)
    except Exception as error:  # noqa: BLE001  (validators of a plugin's model are not our code)
        origin = source.origin(base)
        message = f"its options cannot be read: {type(error).__name__}: {error}"
        problem = Problem(path=dotted(base), message=message, source=origin.source, line=origin.line, owner=owner)
        return Parsed(None, [problem], [base])
    # A plugin's own model need not think of NaN and infinity.
    for inside in _not_finite(raw) if not parsed.problems else ():
        where = base + inside
        origin = source.origin(where)
        parsed.problems.append(
            Problem(
                path=dotted(where),
                value=show(_at(raw, inside)),
                message="must be a finite number",
                source=origin.source,
                line=origin.line,
                owner=owner,
            )
        )
        parsed.broken.append(where)
    return Parsed(None if model is NoOptions or parsed.problems else parsed.model, parsed.problems, parsed.broken)


class NoOptions(BaseModel):
    """Of a capability that declares no option model."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _not_finite(raw: Any) -> Iterator[KeyPath]:
    """Where NaN and infinity stand."""
    if isinstance(raw, float) and not math.isfinite(raw):
        yield ()
    items: Iterable[tuple[str | int, Any]] = ()
    if isinstance(raw, dict):
        items = raw.items()
    elif isinstance(raw, list):
        items = enumerate(raw)
    for key, value in items:
        yield from ((key, *rest) for rest in _not_finite(value))


def _existing(raw: Any, loc: KeyPath, kind: str) -> KeyPath:
    """`loc` without the member names that pydantic adds for unions; a missing key keeps its name."""
    path: KeyPath = ()
    for part in loc:
        if _holds(raw, part):
            raw = raw[part]
            path = (*path, part)
        elif kind == "missing" and part == loc[-1]:
            path = (*path, part)
    return path


def _holds(raw: Any, part: str | int) -> bool:
    if isinstance(raw, list):
        return isinstance(part, int) and part < len(raw)
    return isinstance(raw, dict) and part in raw


def _problem(
    model: type[BaseModel], detail: Any, raw: Mapping[str, Any], where: KeyPath, base: KeyPath
) -> dict[str, Any]:
    kind, context = detail["type"], detail.get("ctx", {})
    path = dotted(where)
    inside = where[len(base) :]
    if kind == "extra_forbidden":
        return {"path": path, "message": _unknown(model, inside, base)}
    if kind == "missing":
        described = _describe(model, inside)
        return {"path": path, "message": "is missing" + (f" ({described})" if described else "")}
    if kind == "json_invalid":
        return {"path": path, "message": "holds a character that is not Unicode text"}
    value = show(_at(raw, inside))
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        short = picks.short_key(where)
        shape = "must be a name, or a mapping with `use`" if short == "use" else "must be a mapping of keys"
        if _at(raw, inside) is None:
            shape += "; leave the section out to have its defaults"
        return {"path": path, "value": value, "message": shape}
    if kind in ("literal_error", "enum"):
        return {"path": path, "value": value, **_one_of(_at(raw, inside), context)}
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    for theirs, ours in _PHRASES.items():
        message = message.replace(theirs, ours)
    return {"path": path, "value": value, "message": message}


_PHRASES = {
    "Input should be a valid ": "must be a ",
    "Input should be ": "must be ",
    "must be a integer": "must be an integer",
    "must be a array": "must be a list",
    "must be a tuple": "must be a list",
    "must be a dictionary": "must be a mapping",
    "Field required": "is missing",
    "String should match pattern": "must match the pattern",
    "String should have": "must have",
}


def _one_of(found: Any, context: Mapping[str, Any]) -> dict[str, str]:
    expected = str(context.get("expected", ""))
    names = [name.strip().strip("'") for name in expected.replace(" or ", ", ").split(",")]
    if len(names) == 1:
        return {"message": f"must be `{names[0]}`"}
    close = closest(str(found), names)
    message = "must be one of " + ", ".join(f"`{name}`" for name in names)
    return {"message": message + (f". Did you mean `{close}`?" if close else "")}


def _unknown(model: type[BaseModel], inside: KeyPath, base: KeyPath) -> str:
    key = str(inside[-1])
    siblings = list(fields_of(model, inside[:-1]))
    meant = KEYS.get(plain(key), "")
    section, _, last = meant.rpartition(".")
    if last in siblings and section == dotted((*base, *inside[:-1])):
        return f"unknown key. Did you mean `{last}`?"
    if close := closest(key, siblings):
        return f"unknown key. Did you mean `{close}`?"
    elsewhere = [path for path in known_paths(RunSpec) if path.split(".")[-1] == key] or ([meant] if meant else [])
    if elsewhere:
        return f"unknown key here. Did you mean `{elsewhere[0]}`?"
    if not siblings:
        return "unknown key; " + ("this capability takes no options" if base else "nothing may be written here")
    return "unknown key; known here: " + ", ".join(siblings)


def fields_of(model: type[BaseModel], path: KeyPath) -> dict[str, FieldInfo]:
    """Fields of the section at `path`, or nothing when there is no section."""
    found: type[BaseModel] | None = model
    for part in path:
        if isinstance(part, int):
            continue
        field_info = found.model_fields.get(part) if found else None
        found = submodel(field_info.annotation) if field_info else None
    return dict(found.model_fields) if found else {}


def submodel(annotation: Any) -> type[BaseModel] | None:
    """The model inside an annotation such as ``tuple[Pick, ...] | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for member in get_args(annotation) if (model := submodel(member))), None)


def known_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key of a model, sections included."""
    for name, info in model.model_fields.items():
        yield prefix + name
        if nested := submodel(info.annotation):
            yield from known_paths(nested, f"{prefix}{name}.")


def _describe(model: type[BaseModel], inside: KeyPath) -> str:
    info = fields_of(model, inside[:-1]).get(str(inside[-1]))
    return " ".join((info.description or "").rstrip(".").split()) if info else ""


def _at(raw: Any, path: KeyPath) -> Any:
    for part in path:
        raw = raw[part]
    return raw
