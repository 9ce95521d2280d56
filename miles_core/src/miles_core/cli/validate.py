"""`miles validate RUN`: every problem of a run-file at once; starts nothing."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator

import click

from miles_core.config.checks import Found
from miles_core.config.load import load
from miles_core.config.problems import RunFileError, render_json, render_text
from miles_core.config.resolve import ResolvedRun, resolve
from miles_core.registry import Registry, discover

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
            _warn(warning)
        resolve(source, registry, look=functools.partial(_look, registry))
    except RunFileError as error:
        click.echo(render_json(error.problems) if as_json else render_text(error.problems))
        sys.exit(INVALID)
    click.echo(render_json(()) if as_json else f"{run_file}: no problems.")


def _look(registry: Registry, run: ResolvedRun) -> Iterator[Found]:
    from miles_core.driver.first_look import first_look  # numpy and more, which a misspelt key need not wait for

    return first_look(run, registry, warn=_warn)


def _warn(text: str) -> None:
    click.echo(f"warning: {text}", err=True)
