"""`miles plan memory`: bytes of the fullest rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from miles_core.registry import Entry


@click.command("memory")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--backend", default="fsdp", show_default=True, help="Which backend trains.")
@click.option("--gpus", type=click.IntRange(1), default=1, show_default=True, help="Trainer ranks.")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="backend.KEY=VALUE",
    help="A key of the backend with the meaning, default and rules that it has in a run-file.",
)
@click.option("--reference", is_flag=True, help="A reference policy stays in memory.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def command(model: Path, backend: str, gpus: int, overrides: tuple[str, ...], reference: bool, as_json: bool) -> None:
    """Plan the memory of the fullest rank that trains MODEL, a Hugging Face folder; config.json alone is enough."""
    from miles_core.cli import table
    from miles_core.config.model_folder import ModelFolderError
    from miles_core.errors import ConfigError
    from miles_core.plan import show_bytes
    from miles_core.planning.memory import Planner
    from miles_core.planning.sizes import read_sizes
    from miles_core.registry import discover, load_target

    entry = discover().resolve("backend", backend)
    if entry.capability.memory is None:
        raise click.UsageError(f"backend {backend} does not say what its ranks hold")
    options = _options(entry, overrides, gpus, model)
    try:
        sizes = read_sizes(model)
    except ModelFolderError as error:
        do = "name a folder with config.json"
        raise ConfigError("this memory cannot be planned", found=str(error), where=str(model), do=do) from error
    planner: Planner = load_target(entry.capability.memory)
    rank = planner(options, sizes, gpus, reference)
    if as_json:
        items = {item.what: item.num_bytes for item in rank.items}
        click.echo(json.dumps({"stage": rank.stage, "items": items, "total": rank.total}, indent=1))
        return
    rows = [(item.what, show_bytes(item.num_bytes), f"{item.num_bytes / rank.total:.0%}") for item in rank.items]
    click.echo(f"{model}: {sizes.total / 1e9:,.2f} B parameters, {sum(sizes.experts) / 1e9:,.2f} B in routed experts")
    place = f"fullest rank, stage {rank.stage}" if rank.stage is not None else "each rank"
    click.echo(table.render((place, "", ""), [*rows, ("together", show_bytes(rank.total), "")]))


def _options(entry: Entry, overrides: tuple[str, ...], gpus: int, model: Path) -> Any:
    """The backend's options as a run-file with these lines would give them, its rules held.

    Raises:
        RunFileError: with every problem at once.
    """
    from miles_core.config import translate
    from miles_core.config.load import parse
    from miles_core.config.problems import Problem, RunFileError
    from miles_core.registry import load_target
    from miles_core.rules import evaluate, facts_of

    source = parse(f"backend: {{use: {entry.name}}}", overrides)
    given = source.tree["backend"]
    if set(source.tree) != {"backend"} or not isinstance(given, dict) or given.pop("use") != entry.name:
        raise click.UsageError("--set takes keys of the backend: --set backend.micro_batch_tokens=8192")
    read = translate.read_options(
        load_target(entry.capability.options) if entry.capability.options else None,
        given,
        source,
        ("backend",),
        owner=entry.owner,
    )
    if problems := [*source.problems, *read.problems]:
        raise RunFileError(problems)
    values = {
        "model": {"path": str(model)},
        "placement": {"trainer_ranks": gpus},
        "backend": {"use": entry.name, **(read.model.model_dump(mode="json") if read.model else {})},
    }
    owned = [(rule, entry.owner) for rule in entry.capability.rules]
    violations = evaluate(owned, facts_of(values, {"backend": entry.capability.provides}), load_target)
    if violations:
        raise RunFileError(
            Problem(
                path=each.paths[0],
                message=f"{each.found}; {each.rule.because}",
                rule=each.rule.id,
                owner=each.owner,
                do=each.rule.instead,
            )
            for each in violations
        )
    return read.model
