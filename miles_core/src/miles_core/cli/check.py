"""miles check: test this machine piece by piece, so that a newcomer knows which one is at fault."""

from __future__ import annotations

import json
import sys

import click


@click.command("check")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
def command(as_json: bool) -> None:
    """Check environment, trainer, engine and one toy step, on a tiny random model; exit code 1 when one fails."""
    from miles_core.driver.selfcheck import run_checks

    outcomes = []
    for outcome in run_checks():
        outcomes.append(outcome)
        if not as_json:
            mark = "ok    " if outcome.ok else "FAILED"
            click.echo(f"{mark} {outcome.name:<12} {outcome.seconds:6.1f} s   {outcome.detail}")
            if outcome.remedy:
                click.echo(f"       do: {outcome.remedy}")
    if as_json:
        click.echo(json.dumps([outcome.as_json() for outcome in outcomes], indent=1))
    sys.exit(0 if all(outcome.ok for outcome in outcomes) else 1)
