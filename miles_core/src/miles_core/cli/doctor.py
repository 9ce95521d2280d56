"""`miles doctor`: which of a run's contracts is broken, since when, and what to try."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from miles_core.doctor.diagnosis import Diagnosis


@click.command("doctor")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="The diagnosis as JSON.")
@click.pass_context
def command(context: click.Context, run: Path, as_json: bool) -> None:
    """Say in words which contract of RUN is broken, since when, and what to try.

    Reads the run's events, metrics and rollouts, changes nothing, and ends with code 1 when a contract is broken.
    """
    from dataclasses import asdict

    from miles_core.doctor.diagnosis import diagnose
    from miles_core.report.load import load_run

    diagnosis = diagnose(load_run(run))
    click.echo(json.dumps(asdict(diagnosis), indent=1, ensure_ascii=False) if as_json else _words(diagnosis))
    context.exit(0 if diagnosis.healthy else 1)


def _words(diagnosis: Diagnosis) -> str:
    lines = [diagnosis.cut_short or f"Read {diagnosis.steps} of {diagnosis.planned} steps.", ""]
    for finding in diagnosis.findings:
        lines += [f"{finding.contract}: broken since step {finding.since} ({finding.cause})", f"  {finding.says}"]
        lines += [f"  evidence  {text}" for text in finding.evidence]
        lines += [f"  try       {text}" for text in finding.try_]
        lines.append("")
    if diagnosis.healthy:
        lines += ["No contract is broken.", ""]
    lines += [f"  {contract.ljust(9)} {text}" for contract, text in diagnosis.readings]
    lines += [f"  async     {diagnosis.state}"] if diagnosis.state else []
    lines += [f"  unknown   {text}" for text in diagnosis.blind]
    return "\n".join(lines)
