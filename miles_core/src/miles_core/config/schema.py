"""Makes the JSON schema of a run-file on this machine: the sections of the core, and for each pick what is installed.

It uses draft 7, which every YAML language server understands. It covers what one value may be. How values fit together
is checked by `miles validate`.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from miles_core.capability import KINDS, State
from miles_core.config.picks import SECTIONS
from miles_core.config.spec import RewardPick, RunSpec
from miles_core.registry import FUNCTION_KINDS, Entry, Registry, load_target

Schema = dict[str, Any]

DRAFT = "http://json-schema.org/draft-07/schema#"
FUNCTION_PATTERN = r"^.+:[A-Za-z_][A-Za-z0-9_]*$"
_REF = "#/definitions/"


def run_file_schema(registry: Registry) -> Schema:
    """Make the schema. Capabilities that cannot be picked here are left out.

    Raises:
        PluginError: an option model of a usable capability cannot be imported.
    """
    definitions: Schema = {}
    root = _model_schema(RunSpec, definitions, prefix="")
    for pick in ("Pick", "RewardPick"):
        definitions.pop(pick, None)
    for kind, section in SECTIONS.items():
        definitions[f"{kind} pick"] = _pick_schema(kind, registry, definitions)
        _point_at(root, definitions, section, {"$ref": f"{_REF}{kind} pick"}, many=KINDS[kind].many)
    _allow(root, "model", "string")
    _allow(root, "data", "string")
    _allow(root, "eval", "null")
    return {"$schema": DRAFT, **root, "title": "Miles run-file", "definitions": definitions}


def _model_schema(model: type[BaseModel], definitions: Schema, *, prefix: str) -> Schema:
    """The model's schema, its nested models moved to `definitions` under the prefix."""
    schema = model.model_json_schema(ref_template=f"{_REF}{prefix}{{model}}")
    definitions.update({prefix + name: _draft_7(nested) for name, nested in schema.pop("$defs", {}).items()})
    result = _draft_7(schema)
    assert isinstance(result, dict)
    return result


def _draft_7(node: Any) -> Any:
    """`prefixItems` is the one newer word pydantic uses; draft 7 writes it as a list in `items`."""
    if isinstance(node, list):
        return [_draft_7(item) for item in node]
    if not isinstance(node, dict):
        return node
    result = {key: _draft_7(value) for key, value in node.items()}
    if "prefixItems" in result:
        result |= {"items": result.pop("prefixItems"), "additionalItems": False}
    return result


def _pick_schema(kind: str, registry: Registry, definitions: Schema) -> Schema:
    usable = [entry for entry in registry.entries(kind) if entry.state is State.OK]
    long = [_long_form(entry, definitions) for entry in usable]
    without = [entry.name for entry, form in zip(usable, long, strict=True) if form["required"] == ["use"]]
    forms: list[Schema] = [{"enum": without, "description": KINDS[kind].summary}] if without else []
    forms += long
    if kind in FUNCTION_KINDS:
        own = {"type": "string", "pattern": FUNCTION_PATTERN, "description": "module:function or file.py:function"}
        forms += [own, _closed({"use": own, **_core_keys(kind)}, ["use"])]
    none: list[Schema] = [{"not": {}}]
    return {"title": kind, "oneOf": forms or none}


def _long_form(entry: Entry, definitions: Schema) -> Schema:
    capability = entry.capability
    use = {"const": capability.name, "description": capability.summary}
    options: Schema = {}
    if capability.options is not None:
        options = _model_schema(load_target(capability.options), definitions, prefix=f"{entry.kind}.{entry.name}.")
    properties = {"use": use, **_core_keys(entry.kind), **options.get("properties", {})}
    form = _closed(properties, ["use", *options.get("required", [])])
    if "additionalProperties" in options:
        form["additionalProperties"] = options["additionalProperties"]
    form |= {"title": entry.name, "description": f"{capability.summary} ({entry.owner})"}
    return form


def _closed(properties: Schema, required: list[str]) -> Schema:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _core_keys(kind: str) -> Schema:
    """Keys of a pick that the core itself reads, besides `use`."""
    if kind != "reward":
        return {}
    properties: Schema = RewardPick.model_json_schema()["properties"]
    return {name: schema for name, schema in properties.items() if name != "use"}


def _point_at(root: Schema, definitions: Schema, section: tuple[str, ...], target: Schema, *, many: bool) -> None:
    """Replace pydantic's open pick at `section` by a choice of what is installed."""
    at = root
    for part in section[:-1]:
        at = definitions[at["properties"][part]["$ref"].removeprefix(_REF)]
    old: Schema = at["properties"][section[-1]]
    new: Schema = {"type": "array", "items": target} if many else target
    nullable = {"type": "null"} in old.get("anyOf", [])
    members: list[Schema] = [new, {"type": "null"}] if nullable else [new]
    at["properties"][section[-1]] = {"anyOf": members, **_described(old)}


def _allow(root: Schema, name: str, shape: str) -> None:
    """Allow a section to be null, or a bare text that stands for its main key."""
    old = root["properties"][name]
    members = old.get("anyOf") or [{"$ref": old["$ref"]}]
    root["properties"][name] = {"anyOf": [{"type": shape}, *members], **_described(old)}


def _described(property_schema: Schema) -> Schema:
    return {key: property_schema[key] for key in ("description", "default") if key in property_schema}
