"""Budgets of the run-file, and its round trip through text."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from miles_core.config import translate
from miles_core.config.load import parse
from miles_core.config.spec import Pick, RewardPick, RunSpec, SamplingSpec, Section, dump

MAX_FIELDS_A_SECTION = 20
MAX_TOP_KEYS = 28
MAX_FIELDS = 125


def sections(model: type[BaseModel] = RunSpec) -> dict[str, type[BaseModel]]:
    """Every section class by name, the root included; picks are no sections."""
    found = {model.__name__: model}
    for info in model.model_fields.values():
        nested = translate.submodel(info.annotation)
        if nested is not None and issubclass(nested, Section):
            found |= sections(nested)
    return found


@pytest.mark.parametrize("name", sections())
def test_a_section_stays_small_and_explains_every_key(name: str) -> None:
    fields = sections()[name].model_fields
    assert len(fields) <= (MAX_TOP_KEYS if name == "RunSpec" else MAX_FIELDS_A_SECTION)
    assert [key for key, info in fields.items() if not (info.description or "").strip()] == []
    assert all(str(info.description).endswith(".") for info in fields.values())


def test_the_whole_run_file_stays_small() -> None:
    assert sum(len(model.model_fields) for model in sections().values()) <= MAX_FIELDS


def test_durations_and_counts_of_tokens_carry_their_unit() -> None:
    keys = [path.split(".")[-1] for path in translate.known_paths(RunSpec)]
    assert [key for key in keys if "timeout" in key and not key.endswith("_s")] == []
    assert [key for key in keys if "length" in key and not key.endswith(("_tokens", "context_length"))] == []


# --- round trip -------------------------------------------------------------------------------------------------------

NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True)
TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
LEAVES = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
)
OPTIONS = st.dictionaries(
    NAMES.filter(lambda name: name not in ("use", "weight")), LEAVES | st.lists(LEAVES, max_size=3), max_size=3
)


def picks(model: type[Pick]) -> st.SearchStrategy[Any]:
    weight = {"weight": st.floats(-5, 5).filter(bool)} if model is RewardPick else {}
    return st.builds(lambda use, options, **core: {"use": use, **core, **options}, use=TEXTS, options=OPTIONS, **weight)


def values(annotation: Any, bounds: Sequence[Any] = ()) -> st.SearchStrategy[Any]:
    """Plain values that fit an annotation of `RunSpec` and the bounds in its metadata."""
    if annotation in (int, float):
        return numbers(annotation, bounds)
    if annotation in (str, bool):
        return TEXTS if annotation is str else st.booleans()
    if isinstance(annotation, type):
        return picks(annotation) if issubclass(annotation, Pick) else instances(annotation)
    members, origin = get_args(annotation), get_origin(annotation)
    if origin is Literal:
        return st.sampled_from(members)
    if origin is Annotated:
        return values(members[0], members[1:])
    if type(None) in members:
        return st.none() | values(next(member for member in members if member is not type(None)), bounds)
    if members[-1] is Ellipsis:
        return st.lists(values(members[0]), max_size=2)
    return st.tuples(*map(values, members)).map(list)


def numbers(kind: type, bounds: Sequence[Any]) -> st.SearchStrategy[Any]:
    found = [part for bound in bounds for part in getattr(bound, "metadata", [bound])]
    low = next((part.ge for part in found if hasattr(part, "ge")), 0 if kind is float else 1)
    high = next((part.le for part in found if hasattr(part, "le")), 10**6)
    if any(hasattr(part, "lt") for part in found):
        high = 0.5
    return st.integers(int(low), int(high)) if kind is int else st.floats(max(low, 1e-9), high)


def instances(model: type[BaseModel]) -> st.SearchStrategy[dict[str, Any]]:
    required = {
        name: values(info.annotation, info.metadata) for name, info in model.model_fields.items() if info.is_required()
    }
    optional = {
        name: values(info.annotation, info.metadata)
        for name, info in model.model_fields.items()
        if not info.is_required()
    }
    if model is RunSpec:
        required["name"] = NAMES
    return st.fixed_dictionaries(required, optional=optional)


@settings(max_examples=40, deadline=None)
@given(instances(RunSpec))
def test_a_written_spec_loads_to_the_same_spec(raw: dict[str, Any]) -> None:
    spec = translate.strict(RunSpec, raw)
    source = parse(dump(spec))
    assert source.problems == ()
    assert translate.strict(RunSpec, source.tree) == spec
    assert dump(translate.strict(RunSpec, source.tree)) == dump(spec)


def test_a_written_spec_names_every_key() -> None:
    spec = RunSpec.model_validate({"name": "x", "model": "m", "data": "d", "schedule": {"steps": 1}})
    tree = parse(dump(spec)).tree
    for path in translate.known_paths(RunSpec):
        at: Any = tree
        for part in path.split("."):
            if not isinstance(at, dict):
                break  # a list, or a null that stands for its section
            assert part in at, path
            at = at[part]


# --- every key is read ------------------------------------------------------------------------------------------------

READ_ELSEWHERE = {
    "plugins.disable": "Source.disabled_plugins reads it from the raw tree, before the registry exists",
    "tracking.trackers": "resolve turns it into ResolvedRun.many, null into the default tracker",
}


def test_every_key_is_read_somewhere_outside_its_definition() -> None:
    """A key that nothing reads would be a setting silently ignored."""
    read = _attributes_read()
    unread = [
        path
        for path in translate.known_paths(RunSpec)
        if path not in READ_ELSEWHERE
        and "." in path
        and path.split(".")[-1] not in read
        and "use" not in path.split(".")
    ]
    assert unread == []


def _attributes_read() -> set[str]:
    """Names read as attributes anywhere in miles_core but where keys are defined and checked."""
    found = importlib.util.find_spec("miles_core")
    assert found is not None
    assert found.origin is not None
    root = Path(found.origin).parent
    names: set[str] = set()
    for path in root.rglob("*.py"):
        if path.is_relative_to(root / "config"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
    return names


def test_an_empty_stop_string_would_stop_before_the_first_token() -> None:
    with pytest.raises(ValidationError, match="at least 1 character"):
        SamplingSpec(stop=("",))


@pytest.mark.parametrize("weight", [0, 0.0, float("nan"), float("inf")])
def test_a_reward_that_cannot_count_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match=r"weight 0|finite"):
        RewardPick(use="math", weight=weight)
    assert RewardPick(use="math", weight=-0.5).weight == -0.5
