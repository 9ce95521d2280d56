"""Tools as elements, one tag a fact: the form Qwen3-Coder and Nemotron were trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from miles_core.types import Tool


def function_element(tool: Tool, *, enums: bool = False, required_last: bool = False) -> str:
    """``<function>`` with name, description and parameters.

    Args:
        enums: Write an argument's ``enum`` directly behind its description.
        required_last: Write ``required`` behind the other facts of the parameters.
    """
    function = tool.get("function", tool)
    lines = ["<function>", f"<name>{function['name']}</name>"]
    if "description" in function:
        lines.append(f"<description>{str(function['description']).strip()}</description>")
    lines.append("<parameters>")
    parameters = function.get("parameters")
    if isinstance(parameters, Mapping):
        properties = parameters.get("properties")
        for name, fields in properties.items() if isinstance(properties, Mapping) else ():
            lines += _parameter(name, fields, enums=enums)
        handled = {"type", "properties"} | ({"required"} if required_last else set())
        lines += _others(parameters, handled)
        if required_last and "required" in parameters:
            lines.append(f"<required>{json.dumps(parameters['required'], ensure_ascii=False)}</required>")
    lines.append("</parameters>")
    lines += _others(function, {"type", "name", "description", "parameters"})
    lines.append("</function>")
    return "\n".join(lines)


def _parameter(name: str, fields: Mapping[str, Any], *, enums: bool) -> list[str]:
    lines = ["<parameter>", f"<name>{name}</name>"]
    handled = {"name", "type", "description"}
    if "type" in fields:
        lines.append(f"<type>{fields['type']}</type>")
    if "description" in fields:
        lines.append(f"<description>{str(fields['description']).strip()}</description>")
    if enums:
        handled.add("enum")
        if "enum" in fields:
            lines.append(f"<enum>{json.dumps(fields['enum'], ensure_ascii=False)}</enum>")
    return [*lines, *_others(fields, handled), "</parameter>"]


def _others(fields: Mapping[str, Any], handled: set[str]) -> list[str]:
    return [f"<{key}>{_shown(value)}</{key}>" for key, value in fields.items() if key not in handled]


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping | list | tuple) else str(value)
