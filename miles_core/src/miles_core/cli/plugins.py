"""`miles plugins`: list, show, check, new. Listing imports no plugin's code beyond its descriptors."""

from __future__ import annotations

import json
from typing import Any

import click

from miles_core.capability import KINDS, State
from miles_core.cli import table
from miles_core.cli.lazy import LazyCommand, LazyGroup
from miles_core.registry import Entry, Plugin, Registry, discover

COMMANDS = {
    "list": LazyCommand(
        "miles_core.cli.plugins:list_command", "Show every capability installed, and every plugin that failed."
    ),
    "show": LazyCommand("miles_core.cli.plugin_show:command", "Explain one: options, rules, tags."),
    "check": LazyCommand("miles_core.cli.plugin_check:command", "Load everything and verify what it declares."),
    "new": LazyCommand("miles_core.cli.new:command", "Create a plugin of your own whose tests pass."),
}

command = LazyGroup("plugins", lazy=COMMANDS, help="Work with plugins.")

NOT_HERE = "not here"
"""What a run may pick and this environment lacks a module for."""
_COLOURS: dict[str, str] = {
    NOT_HERE: "yellow",
    State.OK: "green",
    State.DISABLED: "bright_black",
    State.UNAVAILABLE: "yellow",
    State.INCOMPATIBLE: "red",
    State.BROKEN: "red",
    State.CONFLICT: "red",
}


@click.command("list")
@click.option("--kind", type=click.Choice(list(KINDS)), help="Only this kind.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable, on stdout.")
def list_command(kind: str | None, as_json: bool) -> None:
    """Show every capability installed, and every plugin that failed."""
    registry = discover()
    rows = _rows(registry, kind)
    for warning in registry.warnings:
        click.echo(f"warning: {warning}", err=True)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    click.echo(_table(rows))


def _rows(registry: Registry, kind: str | None) -> list[dict[str, Any]]:
    failed = [plugin for plugin in registry.plugins if plugin.state is not State.OK and kind is None]
    return [_entry_row(entry) for entry in registry.entries(kind)] + [_plugin_row(plugin) for plugin in failed]


def _entry_row(entry: Entry) -> dict[str, Any]:
    return {
        "kind": entry.kind,
        "name": entry.name,
        "distribution": entry.distribution,
        "version": entry.version,
        "state": entry.state.value,
        "summary": entry.capability.summary,
        "stability": entry.capability.stability,
        "plugin": entry.plugin,
        "reason": entry.reason,
        "do": entry.do,
        "absent": [{"module": module, "do": do} for module, do in entry.absent],
    }


def _plugin_row(plugin: Plugin) -> dict[str, Any]:
    return {
        "kind": None,
        "name": None,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "state": plugin.state.value,
        "summary": "",
        "stability": None,
        "plugin": plugin.name,
        "reason": plugin.reason,
        "do": plugin.do,
        "absent": [],
    }


def _table(rows: list[dict[str, Any]]) -> str:
    cells = [
        (
            row["kind"] or "-",
            row["name"] or "-",
            f"{row['distribution']} {row['version']}",
            NOT_HERE if row["state"] == State.OK and row["absent"] else row["state"],
            _last_cell(row),
        )
        for row in rows
    ]

    def style(column: int, text: str) -> str:
        return click.style(text, fg=_COLOURS[text.strip()]) if column == 3 else text

    return table.render(("KIND", "NAME", "FROM", "STATE", "SUMMARY"), cells, width=table.terminal_width(), style=style)


def _last_cell(row: dict[str, Any]) -> str:
    if row["reason"]:
        return f"{row['reason']}. {row['do']}".removesuffix(". ")
    return ". ".join([*(f"no module {each['module']}: {each['do']}" for each in row["absent"]), row["summary"]])
