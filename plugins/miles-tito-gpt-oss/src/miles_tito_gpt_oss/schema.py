"""Tools as TypeScript, the form gpt-oss was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from miles_core.types import Tool

_PLAIN = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean"}


def namespace(tools: Sequence[Tool]) -> str:
    """``namespace functions`` with one type for each tool."""
    return "## functions\n\nnamespace functions {\n\n" + "".join(map(_function, tools)) + "} // namespace functions"


def _function(tool: Tool) -> str:
    function = tool.get("function", tool)
    parameters = function.get("parameters") or {}
    head = f"// {function.get('description', '')}\ntype {function['name']} = "
    properties = parameters.get("properties")
    if not properties:
        return head + "() => any;\n\n"
    required = parameters.get("required") or []
    return (
        head
        + "(_: {\n"
        + "".join(_argument(name, spec, required) for name, spec in properties.items())
        + "}) => any;\n\n"
    )


def _argument(name: str, spec: Mapping[str, Any], required: Sequence[str]) -> str:
    described = f"// {spec['description']}\n" if spec.get("description") else ""
    optional = "" if name in required else "?"
    return f"{described}{name}{optional}: {_type(spec, required)}{_default(spec)},\n"


def _default(spec: Mapping[str, Any]) -> str:
    if "default" not in spec:
        return ""
    if spec.get("enum"):
        return f", // default: {spec['default']}"
    if spec.get("oneOf"):
        return f"// default: {spec['default']}"
    return f", // default: {json.dumps(spec['default'], ensure_ascii=False)}"


def _type(spec: Mapping[str, Any], required: Sequence[str]) -> str:
    kind = spec.get("type")
    nullable = " | null" if spec.get("nullable") else ""
    if kind == "array":
        return _array(spec.get("items"), required) + nullable
    if isinstance(kind, list | tuple) and kind:
        return " | ".join(kind)
    if spec.get("oneOf"):
        return _one_of(spec["oneOf"], required)
    if kind == "string":
        return '"' + '" | "'.join(spec["enum"]) + '"' if spec.get("enum") else "string" + nullable
    if kind == "object":
        return _object(spec)
    return _PLAIN.get(str(kind), "any")


def _array(items: Mapping[str, Any] | None, required: Sequence[str]) -> str:
    if not items:
        return "any[]"
    if items.get("type") in _PLAIN:
        return _PLAIN[items["type"]] + "[]"
    inner = _type(items, required)
    return "any[]" if inner == "object | object" or len(inner) > 50 else inner + "[]"


def _one_of(variants: Sequence[Mapping[str, Any]], required: Sequence[str]) -> str:
    if len(variants) > 1 and any(variant.get("type") == "object" for variant in variants):
        return "any"
    written = []
    for variant in variants:
        described = f"// {variant['description']}" if variant.get("description") else ""
        default = ""
        if "default" in variant:
            default = f"// default: {json.dumps(variant['default'], ensure_ascii=False)}"
        written.append(_type(variant, required) + described + default)
    return " | ".join(written)


def _object(spec: Mapping[str, Any]) -> str:
    properties = spec.get("properties")
    if not properties:
        return "object"
    required = spec.get("required") or []
    # The line break before a nested type is the published template's own.
    fields = (
        f"{name}{'' if name in required else '?'}: \n                {_type(field, required)}"
        for name, field in properties.items()
    )
    return "{\n" + ", ".join(fields) + "}"
