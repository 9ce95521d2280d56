"""`miles plugins show KIND NAME`: everything a descriptor and its option model say."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict
from typing import Any

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from miles_core.capability import KINDS, TAGS, Rule, State
from miles_core.cli import table
from miles_core.errors import PluginError
from miles_core.registry import Entry, Registry, discover, load_target

REQUIRED = "required"


@click.command("show")
@click.argument("kind")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable, on stdout.")
def command(kind: str, name: str, as_json: bool) -> None:
    """Explain one capability: options with types and defaults, rules, and what it provides."""
    registry = discover()
    entries = _find(registry, kind.replace("-", "_"), name)
    if as_json:
        click.echo(json.dumps([_facts(entry) for entry in entries], indent=2))
        return
    click.echo("\n\n".join(_page(entry) for entry in entries))


def _find(registry: Registry, kind: str, name: str) -> list[Entry]:
    found = [entry for entry in registry.entries() if (entry.kind, entry.name) == (kind, name)]
    # `get` knows how to say that there is none; an entry that cannot be picked can still be explained.
    return found or [registry.get(kind, name)]


def options_of(entry: Entry) -> list[dict[str, Any]]:
    """Name, type, default and description of every option a capability takes."""
    if entry.capability.options is None:
        return []
    model = load_target(entry.capability.options)
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise PluginError(f"`{entry.capability.options}` is not a pydantic model", where=entry.owner)
    return describe_fields(model)


def describe_fields(model: type[BaseModel]) -> list[dict[str, Any]]:
    """Name, type, default and description of every field of a model."""
    properties = model.model_json_schema().get("properties", {})
    return [
        {
            "name": field,
            "type": _type_text(properties.get(info.alias or field, {})),
            "default": _default(info),
            "description": info.description or "",
        }
        for field, info in model.model_fields.items()
    ]


def _default(info: FieldInfo) -> Any:
    value = info.get_default(call_default_factory=True) if not info.is_required() else PydanticUndefined
    if value is PydanticUndefined:
        return REQUIRED
    return (
        value
        if value is None or isinstance(value, bool | int | float | str)
        else json.loads(json.dumps(value, default=str))
    )


def _type_text(schema: dict[str, Any]) -> str:
    """A JSON schema in a few words: ``number > 0 | null``."""
    if "anyOf" in schema:
        return " | ".join(_type_text(each) for each in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(json.dumps(each) for each in schema["enum"])
    if "const" in schema:
        return json.dumps(schema["const"])
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[-1]
    text = str(schema.get("type", "any"))
    if text == "array" and isinstance(schema.get("items"), dict):
        text = f"list of {_type_text(schema['items'])}"
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f"{text} {low:g}..{high:g}"
    bounds = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    return text + "".join(f" {sign} {schema[key]:g}" for key, sign in bounds.items() if key in schema)


def _facts(entry: Entry) -> dict[str, Any]:
    capability = entry.capability
    return {
        "kind": entry.kind,
        "name": entry.name,
        "summary": capability.summary,
        "distribution": entry.distribution,
        "version": entry.version,
        "state": entry.state.value,
        "reason": entry.reason,
        "do": entry.do,
        "stability": capability.stability,
        "load": capability.load,
        "options": options_of(entry),
        "provides": sorted(capability.provides),
        "needs": list(capability.needs),
        "absent": [{"module": module, "do": do} for module, do in entry.absent],
        "rules": [asdict(rule) for rule in capability.rules],
        "section": KINDS[entry.kind].section,
    }


def _page(entry: Entry) -> str:
    capability = entry.capability
    state = entry.state.value if entry.state is State.OK else f"{entry.state.value}: {entry.reason}. Do: {entry.do}"
    lines = [
        click.style(f"{entry.kind} {entry.name}", bold=True) + f"   {entry.owner}, {capability.stability}, {state}",
        capability.summary,
        "",
        f"load       {capability.load}",
    ]
    if capability.needs:
        lines.append("needs      " + ", ".join(capability.needs))
    lines += [f"not here   no module {module}: {do}" for module, do in entry.absent]
    lines += [f"provides   {tag}: {TAGS.get(tag, 'not in the vocabulary')}" for tag in sorted(capability.provides)]
    lines += ["", *_options_block(entry), "", *_rules_block(capability.rules), "", *_pick_block(entry)]
    return "\n".join(lines)


def _options_block(entry: Entry) -> list[str]:
    options = options_of(entry)
    if not options:
        return ["options    none"]
    rows = [(f"  {each['name']}", each["type"], _yaml(each["default"]), each["description"]) for each in options]
    return [table.render(("options", "TYPE", "DEFAULT", "MEANING"), rows, width=table.terminal_width())]


def _rules_block(rules: tuple[Rule, ...]) -> list[str]:
    if not rules:
        return ["rules      none"]
    lines = ["rules"]
    for rule in rules:
        when = " and ".join(rule.when) or "always"
        needs = f"; needs {' and '.join(rule.needs)}" if rule.needs else ""
        check = f"; computed by {rule.check}" if rule.check else ""
        lines += [f"  {rule.id}   when {when}{needs}{check}", f"    {rule.because}. Do: {rule.instead}"]
    return lines


def _pick_block(entry: Entry) -> list[str]:
    kind = KINDS[entry.kind]
    if kind.section is None:
        return ["No section of a run-file reads this kind in this release."]
    required = [each["name"] for each in options_of(entry) if each["default"] == REQUIRED]
    pick = f"{{use: {entry.name}, {', '.join(f'{name}: ...' for name in required)}}}" if required else entry.name
    value = f"[{pick}]" if kind.many else pick
    *sections, last = kind.section.split(".")
    text = f"{last}: {value}"
    for section in reversed(sections):
        text = f"{section}:\n" + textwrap.indent(text, "  ")
    return ["in a run-file", textwrap.indent(text, "  ")]


def _yaml(value: Any) -> str:
    if value == REQUIRED:
        return REQUIRED
    return json.dumps(value)
