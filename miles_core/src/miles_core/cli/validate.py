"""`miles validate RUN`: every problem of a run-file at once; starts nothing."""

from __future__ import annotations

import sys

import click

from miles_core.config.load import load
from miles_core.config.problems import RunFileError, render_json, render_text
from miles_core.config.resolve import resolve
from miles_core.registry import discover

INVALID = 2


@click.command("validate")
@click.argument("run_file", type=click.Path())
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a value, as for train.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable, on stdout.")
def command(run_file: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Report every problem of RUN_FILE with its line, reason and remedy. Exit code 2 when there is one."""
    try:
        source = load(run_file, overrides)
        registry = discover(disable=source.disabled_plugins())
        for warning in registry.warnings:
            click.echo(f"warning: {warning}", err=True)
        resolve(source, registry)
    except RunFileError as error:
        click.echo(render_json(error.problems) if as_json else render_text(error.problems))
        sys.exit(INVALID)
    click.echo(render_json(()) if as_json else f"{run_file}: no problems.")
