"""`miles inspect`: the trajectories of a step in the terminal."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command("inspect")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--step", type=int, default=None, help="Step to look at; the last one with rollouts by default.")
@click.option("--sample", type=int, default=None, help="Trajectory to show token by token; all as a table by default.")
@click.option("--json", "as_json", is_flag=True, help="The table as JSON.")
def command(run: Path, step: int | None, sample: int | None, as_json: bool) -> None:
    """Show the trajectories that RUN trained on.

    Tokens are coloured by what the trainer makes of them: dim were given, the others by how far the trainer's log-prob
    is from the engine's. A mark like v12 stands where weight version 12 begins to sample.
    """
    from rich.console import Console

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
    show(Console(), record, step, sample, record.tokenizer)
