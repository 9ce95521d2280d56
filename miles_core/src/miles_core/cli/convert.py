"""miles convert: a run's checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("convert")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--step", type=int, help="Which checkpoint; the newest complete one when left out.")
def command(run_dir: Path, output: Path, step: int | None) -> None:
    """Write the weights that RUN_DIR saved to OUTPUT: safetensors, config and tokenizer."""
    from miles_core.driver.convert import convert

    found = convert(run_dir, output, step=step)
    click.echo(f"step {found} of {run_dir} as {output}")
