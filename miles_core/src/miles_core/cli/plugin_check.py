"""`miles plugins check`: loads everything that is installed and verifies what it declares.

What it proves is the outside: targets exist and have the shape of their kind, option models are closed and documented,
rules can fire. What a capability does is proven by its author's tests, which subclass the kits in `miles_core.testing`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import click
from pydantic import BaseModel, TypeAdapter, ValidationError

from miles_core.capability import KINDS, TAGS, State
from miles_core.cli import table
from miles_core.config.spec import Pick, RunSpec
from miles_core.errors import PluginError
from miles_core.registry import Entry, Plugin, discover, load_target
from miles_core.rules import lint
from miles_core.signatures import faults

SLOW_PLUGIN_MS = 100.0
"""A descriptor module that takes longer imports something it should not."""

Level = Literal["ok", "note", "warning", "failure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one plugin or capability came to."""

    subject: str
    owner: str
    level: Level
    found: tuple[str, ...] = ()
    load_ms: float = 0.0


@click.command("check")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable, on stdout.")
@click.option("--trace", is_flag=True, help="Print the traceback of each plugin that raised.")
def command(as_json: bool, trace: bool) -> None:
    """Load everything and verify what it declares. Exit code 1 when anything fails."""
    registry = discover()
    fields = rule_fields(registry.entries())
    results = [check_plugin(plugin) for plugin in registry.plugins]
    results += [check_entry(entry, fields) for entry in registry.entries()]
    failures = sum(result.level == "failure" for result in results)
    if as_json:
        click.echo(json.dumps([asdict(result) for result in results], indent=2))
    else:
        rows = [(r.level, r.subject, r.owner, f"{r.load_ms:.0f} ms", "; ".join(r.found)) for r in results]
        click.echo(table.render(("", "WHAT", "FROM", "LOAD", "FOUND"), rows, width=table.terminal_width()))
        click.echo(f"{len(results)} checked, {failures} failed")
    for plugin in registry.plugins:
        if trace and plugin.trace:
            click.echo(f"\n{plugin.owner}\n{plugin.trace}", err=True)
    click.get_current_context().exit(1 if failures else 0)


def check_plugin(plugin: Plugin) -> Result:
    """Judge how a plugin's descriptors loaded."""
    level: Level = "ok"
    found: tuple[str, ...] = ()
    if plugin.state is State.DISABLED:
        level, found = "note", (plugin.reason,)
    elif plugin.state is not State.OK:
        level, found = "failure", (f"{plugin.state}: {plugin.reason}", plugin.do)
    elif plugin.load_ms > SLOW_PLUGIN_MS:
        level = "warning"
        found = (f"descriptors took over {SLOW_PLUGIN_MS:.0f} ms: import heavy modules in what `load` names",)
    return Result(subject=f"plugin {plugin.name}", owner=plugin.owner, level=level, found=found, load_ms=plugin.load_ms)


def check_entry(entry: Entry, fields: Mapping[str, Callable[[str], bool]]) -> Result:
    """Load a capability and its options, and judge both and its rules."""
    subject = f"{entry.kind} {entry.name}"
    if entry.state in (State.UNAVAILABLE, State.DISABLED):
        return Result(subject=subject, owner=entry.owner, level="note", found=(f"not loaded: {entry.reason}",))
    found = [] if entry.state is State.OK else [f"{entry.state}: {entry.reason}", entry.do]
    found += [f"there is no tag `{tag}`" for tag in sorted(entry.capability.provides - TAGS.keys())]
    started = time.perf_counter()
    names, problems = _options(entry)
    found += problems
    try:
        found += faults(entry.kind, load_target(entry.capability.load), names)
    except PluginError as error:
        found.append(error.message + (f" ({error.found})" if error.found else ""))
    elapsed = (time.perf_counter() - started) * 1e3
    for rule in entry.capability.rules:
        found += lint(rule, fields)
    return Result(
        subject=subject, owner=entry.owner, level="failure" if found else "ok", found=tuple(found), load_ms=elapsed
    )


def _options(entry: Entry) -> tuple[list[str], list[str]]:
    """Field names of the options model, and what is wrong with it."""
    if entry.capability.options is None:
        return [], []
    try:
        model = load_target(entry.capability.options)
    except PluginError as error:
        return [], [error.message]
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return [], [f"`{entry.capability.options}` is not a pydantic model"]
    problems = []
    if not model.model_config.get("frozen"):
        problems.append(f"`{model.__name__}` is not frozen")
    if model.model_config.get("extra") != "forbid":
        problems.append(f"`{model.__name__}` accepts unknown options: set extra='forbid'")
    problems += [
        f"option `{name}` has no description" for name, info in model.model_fields.items() if not info.description
    ]
    reserved = sorted(
        {"use", "weight"} & model.model_fields.keys() if entry.kind == "reward" else {"use"} & model.model_fields.keys()
    )
    problems += [f"option `{name}` has a name the run-file keeps for itself" for name in reserved]
    return list(model.model_fields), problems


def rule_fields(entries: tuple[Entry, ...]) -> dict[str, Callable[[str], bool]]:
    """Every path a rule may name, with a test for possible literals: the run-file's own, and every pick's options."""
    fields = dict(_model_fields(RunSpec, ""))
    for entry in entries:
        section = KINDS[entry.kind].section
        if section is None or entry.capability.options is None:
            continue
        try:
            model = load_target(entry.capability.options)
        except PluginError:
            continue  # check_entry reports it
        for path, possible in _model_fields(model, f"{section}."):
            earlier = fields.get(path)
            fields[path] = _either(earlier, possible) if earlier else possible
    return fields


def _either(first: Callable[[str], bool], second: Callable[[str], bool]) -> Callable[[str], bool]:
    return lambda text: first(text) or second(text)


def _model_fields(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, Callable[[str], bool]]]:
    for name, info in model.model_fields.items():
        path = f"{prefix}{name}"
        nested = [each for each in _models_in(info.annotation) if each is not model]
        if any(issubclass(each, Pick) for each in nested):
            yield f"{path}.use", lambda text: True
            continue
        for each in nested:
            yield from _model_fields(each, f"{path}.")
        yield path, _possible(info.annotation, info.metadata)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in getattr(annotation, "__args__", ()) for model in _models_in(argument)]


def _possible(annotation: Any, metadata: list[Any]) -> Callable[[str], bool]:
    # pydantic keeps a field's bounds apart from its type; a rule about a value out of bounds could never fire either.
    adapter: TypeAdapter[Any] = TypeAdapter(Annotated[(annotation, *metadata)] if metadata else annotation)

    def possible(text: str) -> bool:
        if text == "null":
            return _accepts(adapter, None)
        # Lax mode reads "2" as a number and "true" as a boolean, as the loader's YAML would; a list holds its elements.
        return any(_accepts(adapter, value) for value in (text, [text]))

    return possible


def _accepts(adapter: TypeAdapter[Any], value: Any) -> bool:
    try:
        adapter.validate_python(value)
    except ValidationError:
        return False
    return True
