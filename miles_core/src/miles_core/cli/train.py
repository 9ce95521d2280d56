"""miles train: run a run-file, or show what it would do."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command("train")
@click.argument("run_file", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a value; VALUE is YAML.")
@click.option("--resume", is_flag=True, help="Go on from the newest complete checkpoint of this run.")
@click.option("--fresh", is_flag=True, help="Keep an earlier run of this name aside and start a new one.")
@click.option("--dry-run", is_flag=True, help="Print the resolved plan and take nothing.")
@click.option("--plain", is_flag=True, help="One line a step instead of the live display.")
def command(run_file: Path, overrides: tuple[str, ...], resume: bool, fresh: bool, dry_run: bool, plain: bool) -> None:
    """Train as RUN_FILE says. Ctrl-C finishes the step and saves; twice stops now."""
    from miles_core import plan as plans
    from miles_core.config.load import load
    from miles_core.config.resolve import resolve
    from miles_core.driver.first_look import first_look, held_out, require_device
    from miles_core.machine import Host
    from miles_core.registry import discover

    if resume and fresh:
        raise click.UsageError("--resume continues a run and --fresh starts a new one; choose one")
    source = load(run_file, overrides)
    registry = discover(source.disabled_plugins())
    warnings = list(registry.warnings)
    resolved = resolve(source, registry, look=lambda run: first_look(run, registry, warn=warnings.append))
    for warning in warnings if dry_run else registry.warnings:  # the run itself says what it meets at its start
        click.echo(f"warning: {warning}", err=True)
    plan = plans.make_plan(resolved, Host.here(), held_out=held_out(resolved))
    if dry_run:
        click.echo(plans.render(plan))
        return
    require_device(plan)
    from miles_core.driver.launch import train
    from miles_core.tracking.live import make_display

    schedule = resolved.spec.schedule
    display = make_display(steps=schedule.steps, groups=schedule.groups_per_step, plain=plain)
    sys.exit(train(source, resolved, registry, plan, display, resume=resume, fresh=fresh))
