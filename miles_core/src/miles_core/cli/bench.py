"""`miles bench`: measurements on the user's own machines."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import click


@click.group("bench")
def command() -> None:
    """Measure on these machines what the plan can only forecast."""


@command.command("transports")
@click.argument("run_file", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change the run-file.")
@click.option(
    "--with",
    "given",
    multiple=True,
    metavar="NAME={OPTIONS}",
    help="Options of a transport.",
)
@click.option("--versions", type=click.IntRange(1), default=3, show_default=True, help="Publishes measured for each.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def transports(
    run_file: Path, overrides: tuple[str, ...], given: tuple[str, ...], versions: int, as_json: bool
) -> None:
    """Publish a few versions of RUN_FILE's model through every transport it can use, and recommend one."""
    from miles_core.cli import table
    from miles_core.config.load import load
    from miles_core.driver import bench
    from miles_core.plan import show_bytes
    from miles_core.registry import discover

    runs, outcomes = bench.candidates(load(run_file, overrides), discover(), _options(given))
    if runs:
        outcomes = [*asyncio.run(bench.bench_transports(runs, versions=versions)), *outcomes]
    best, reason = bench.recommend(outcomes)
    if as_json:
        listed = [{"name": o.name, "figures": dict(o.figures), "why_not": o.why_not} for o in outcomes]
        click.echo(json.dumps({"transports": listed, "recommended": best, "reason": reason}, indent=1))
        return
    head = ("transport", "moved", "changed", "update s", "pause s", "proof s", "host memory")
    rows = [
        (
            o.name,
            show_bytes(int(o.figures["sync/wire_bytes"])),
            f"{o.figures['sync/density']:.2%}" if "sync/density" in o.figures else "",
            f"{o.figures['update_s']:.3f}",
            f"{o.figures['sync/pause_s']:.3f}",
            f"{o.figures.get('sync/verify_s', 0.0) + o.figures.get('sync/probe_s', 0.0):.3f}",
            show_bytes(int(o.figures["host_bytes"])),
        )
        for o in outcomes
        if o.figures
    ]
    click.echo(table.render(head, rows))
    for outcome in outcomes:
        if not outcome.figures:
            click.echo(f"{outcome.name}: not tried: {outcome.why_not}")
    click.echo(f"take {best}: it {reason}" if not reason.startswith("the only") else f"take {best}: {reason}")


def _options(given: tuple[str, ...]) -> dict[str, dict[str, object]]:
    from miles_core.config import yaml12

    options: dict[str, dict[str, object]] = {}
    for text in given:
        name, separator, value = text.partition("=")
        tree = yaml12.parse(value).value if separator else None
        if not isinstance(tree, dict):
            raise click.BadParameter(f"{text!r} is not NAME={{key: value, …}}", param_hint="--with")
        if name in options or "use" in tree:
            raise click.BadParameter(f"{text!r} names a transport a second time", param_hint="--with")
        options[name] = tree
    return options
