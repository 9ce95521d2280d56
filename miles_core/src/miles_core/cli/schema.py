"""`miles schema`: the JSON schema of a run-file on this machine, for editors."""

from __future__ import annotations

import json

import click

from miles_core.config.schema import run_file_schema
from miles_core.registry import discover


@click.command("schema")
def command() -> None:
    """Print the JSON schema of a run-file, picks limited to what is installed.

    Save it as miles.schema.json and begin a run-file with `# yaml-language-server: $schema=miles.schema.json`.
    """
    click.echo(json.dumps(run_file_schema(discover()), indent=2))
