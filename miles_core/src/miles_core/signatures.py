"""Does an object have the shape its kind's Protocol asks for? Names, arguments and colour (async or not) only.

Behaviour is what the conformance kits in `miles_core.testing` are for; this is the smoke test that needs no instance.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from typing import Any

from miles_core.capability import KINDS

CONSTRUCTED_WITH: dict[str, tuple[str, ...]] = {
    "backend": ("options", "context"),
    "engine": ("options", "context"),
    "transport": ("options",),
    "tito_family": ("options", "tokenizer"),
    "teacher": ("options",),
    "environment": ("options",),
    "data_buffer": ("options", "context"),
    "precision": ("options",),
    "executor": ("options",),
    "tracker": ("options", "run_dir", "run_name", "config"),
    "recipe": ("options",),
}
"""Positional arguments of the constructor for each class kind; the other kinds are objects or functions."""

OBJECT_KINDS = frozenset({"architecture"})
"""Kinds whose `load` is a plain object."""


def protocol_of(kind: str) -> type:
    """The Protocol of a kind."""
    name = "".join(part.capitalize() for part in kind.split("_"))
    protocol = getattr(importlib.import_module(f"miles_core.kinds.{kind}"), name)
    assert isinstance(protocol, type)
    return protocol


def faults(kind: str, target: Any, option_names: Iterable[str] = ()) -> list[str]:
    """What keeps an object from being a capability of a kind.

    Args:
        kind: The kind.
        target: What `load` resolves to.
        option_names: Fields of its options model; functions receive them as keyword arguments.

    Returns:
        One sentence for each fault, empty when it fits.
    """
    assert kind in KINDS, kind
    protocol = protocol_of(kind)
    if kind in CONSTRUCTED_WITH:
        return _class_faults(kind, protocol, target)
    if kind in OBJECT_KINDS:
        if isinstance(target, type):
            return [f"{kind} must be an object, found the class {target.__name__}"]
        wanted = [name for name, value in vars(protocol).items() if isinstance(value, property)]
        return [f"has no attribute `{name}`" for name in wanted if not hasattr(target, name)]
    if not callable(target) or isinstance(target, type):
        return [f"{kind} must be a function, found {target!r}"]
    wanted = _parameters(protocol.__call__)
    found = _bind(target, wanted, dict.fromkeys(option_names))
    faults = (
        [f"cannot be called as ({', '.join(wanted)}{', **options' if option_names else ''}): {found}"] if found else []
    )
    if kind != "reward" and inspect.iscoroutinefunction(target):
        faults.append(f"{kind} must be a plain function, found an async one")
    return faults


def _class_faults(kind: str, protocol: type, target: Any) -> list[str]:
    if not isinstance(target, type):
        return [f"{kind} must be a class, found {target!r}"]
    arguments = CONSTRUCTED_WITH[kind]
    problem = _bind(target, arguments)
    faults = [f"cannot be created as {target.__name__}({', '.join(arguments)}): {problem}"] if problem else []
    for name, wanted in _methods(protocol).items():
        found = getattr(target, name, None)
        if not callable(found):
            faults.append(f"has no method `{name}`")
            continue
        if inspect.iscoroutinefunction(wanted) != inspect.iscoroutinefunction(found):
            colour = "async" if inspect.iscoroutinefunction(wanted) else "a plain method"
            faults.append(f"`{name}` must be {colour}")
        problem = _method_problem(target, name, found, wanted)
        if problem:
            faults.append(f"`{name}` cannot be called as the protocol does: {problem}")
    return faults


def _methods(protocol: type) -> dict[str, Any]:
    """Methods the Protocol and its bases declare, constructor left out."""
    methods: dict[str, Any] = {}
    for base in reversed(protocol.__mro__):
        if base.__module__.startswith("miles_core."):
            methods |= {
                name: value.__func__ if isinstance(value, classmethod) else value
                for name, value in vars(base).items()
                if not name.startswith("_") and (isinstance(value, classmethod) or inspect.isfunction(value))
            }
    return methods


def _method_problem(target: type, name: str, found: Any, wanted: Any) -> str | None:
    parameters = inspect.signature(wanted).parameters.values()
    positional = [each.name for each in parameters if each.kind is not each.KEYWORD_ONLY]
    keyword = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    bound = inspect.ismethod(found) or isinstance(inspect.getattr_static(target, name), staticmethod)
    return _bind(found, positional[1:] if bound else positional, dict.fromkeys(keyword))


def _parameters(function: Any) -> list[str]:
    """Names of the positional parameters after self."""
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)][1:]


def _bind(function: Any, positional: Iterable[str], keyword: dict[str, None] | None = None) -> str | None:
    try:
        inspect.signature(function).bind(*positional, **(keyword or {}))
    except (TypeError, ValueError) as error:
        return str(error)
    return None
