"""miles convert: between a run's checkpoint and a Hugging Face folder, both ways."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("convert")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--step", type=int, help="Which checkpoint; the newest complete one when left out.")
@click.option("--run", "run_file", type=click.Path(path_type=Path), help="Make a run of this run-file out of SOURCE.")
def command(source: Path, output: Path, step: int | None, run_file: Path | None) -> None:
    """Write the weights that the run directory SOURCE saved to OUTPUT: safetensors, config and tokenizer.

    With --run it goes the other way: SOURCE is a Hugging Face folder of the run's model, OUTPUT becomes a run directory
    whose checkpoint of step 0 holds its weights, and `miles train --resume` starts from them under any layout.
    """
    if run_file is None:
        from miles_core.driver.convert import to_folder

        found = to_folder(source, output, step=step)
        click.echo(f"step {found} of {source} as {output}")
        return
    if step is not None:
        raise click.UsageError("--step says which checkpoint of a run; a Hugging Face folder has none")
    from miles_core.config.load import load
    from miles_core.driver.convert import to_run

    to_run(source, output, load(run_file))
    click.echo(f"{source} as step 0 of {output}; continue with")
    click.echo(f"  miles train {run_file} --resume --set tracking.dir={output.absolute().parent}")
