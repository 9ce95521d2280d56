"""`miles inspect`: the trajectories of a step in the terminal."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

UNLIMITED = 10**7
"""Columns of a line that nothing cuts."""


@click.command("inspect")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--step", type=int, default=None, help="Step to look at; the last one with rollouts by default.")
@click.option("--sample", type=int, default=None, help="Trajectory to show token by token; all as a table by default.")
@click.option("--json", "as_json", is_flag=True, help="The table as JSON.")
def command(run: Path, step: int | None, sample: int | None, as_json: bool) -> None:
    """Show the trajectories that RUN trained on.

    Tokens are coloured by what the trainer makes of them: dim were given, the others by how far the trainer's log-prob
    is from the engine's. A mark like v12 stands where weight version 12 begins to sample. A terminal cuts answers
    at its width; a pipe gets them in full.
    """
    from miles_core.errors import DataError
    from miles_core.report.inspect import show, summary_rows
    from miles_core.report.load import load_run

    record = load_run(run)
    if step is None:
        if not record.rollout_steps:
            raise DataError("this run wrote no rollouts", where=str(record.directory.rollouts))
        step = record.rollout_steps[-1]
    rows = record.rollouts(step)
    if sample is not None and not 0 <= sample < len(rows):
        raise DataError(
            f"step {step} has no sample {sample}",
            expected=f"0 to {len(rows) - 1}",
            where=str(record.directory.rollouts),
            do=f"miles inspect {run} --step {step} lists them",
        )
    if as_json:
        click.echo(json.dumps(summary_rows(rows if sample is None else [rows[sample]]), indent=1, ensure_ascii=False))
        return
    _print(lambda console: show(console, record, step, sample, record.tokenizer))


def _print(draw: Callable[[Console], None]) -> None:
    """Draw in the terminal's width; in a pipe every text is in full and every table row on one line."""
    from rich.console import Console

    if sys.stdout.isatty():
        draw(Console())
        return
    console = Console(file=io.StringIO(), width=UNLIMITED)
    with console.capture() as captured:
        draw(console)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))
