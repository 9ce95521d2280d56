"""`miles report`: a run's report as one self-contained page."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("report")
@click.argument("run", type=click.Path(path_type=Path))
def command(run: Path) -> None:
    """Write report.html into the directory RUN and print its path."""
    from miles_core.report.html import write_report

    click.echo(write_report(run))
