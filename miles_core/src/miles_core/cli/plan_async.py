"""`miles plan async`: what a schedule makes of its phases."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from miles_core.cli.numbers import Finite

if TYPE_CHECKING:
    from miles_core.planning.overlap import Forecast, Job
    from miles_core.planning.workload import Draw

MODES = ("sync", "one-step-off", "fully-async")


class Tail(click.ParamType):  # type: ignore[type-arg]
    """``MEDIAN`` or ``MEDIAN:SPREAD``, the 95th percentile over the 5th of a log-normal distribution."""

    name = "median[:spread]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Draw:
        from miles_core.planning.workload import log_normal

        median, _, spread = str(value).partition(":")
        try:
            return log_normal(float(median), spread=float(spread or 1))
        except ValueError as error:
            self.fail(f"{value!r}: {error}", param, ctx)


@click.command("async")
@click.option("--mode", type=click.Choice(MODES), multiple=True, default=MODES, help="All three by default.")
@click.option("--turns", type=Tail(), default="1", show_default=True, help="Turns of a trajectory.")
@click.option("--tokens", type=Tail(), default="1000:4", show_default=True, help="Sampled tokens of a turn.")
@click.option("--wait-s", type=Tail(), default="0", show_default=True, help="Tool or environment time after a turn.")
@click.option("--peak-tokens-s", type=Finite(0, min_open=True), required=True, help="Of all engines together.")
@click.option("--half-at", type=Finite(0), default=0.0, help="Requests at which half the peak is reached.")
@click.option("--train-s", type=Finite(0), required=True, help="Log-probs and updates of one batch.")
@click.option("--publish-s", type=Finite(0), default=0.0, show_default=True, help="Pause of a weight update.")
@click.option("--groups-per-step", type=click.IntRange(1), default=8, show_default=True)
@click.option("--group-size", type=click.IntRange(1), default=8, show_default=True)
@click.option("--max-concurrent-samples", type=click.IntRange(1), help="In flight; one batch by default.")
@click.option("--max-weight-staleness", type=click.IntRange(0), help="No limit by default.")
@click.option("--capacity-factor", type=Finite(0, min_open=True), default=2.0, show_default=True)
@click.option("--update-weights-interval", type=click.IntRange(1), default=1, show_default=True)
@click.option("--refill", type=click.Choice(["sample", "group"]), default="sample", show_default=True)
@click.option("--steps", type=click.IntRange(2), default=50, show_default=True)
@click.option("--seed", type=int, default=0)
@click.option("--scale", default="1", show_default=True, help="Factors on devices, batch and requests, as 1,4,16.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def command(mode: tuple[str, ...], scale: str, as_json: bool, **options: Any) -> None:
    """Simulate a job event by event and compare schedules.

    \b
    A long-tailed agent job, where a batch trains in 200 s:
      miles plan async --turns 12:6 --tokens 420:8 --wait-s 6:10 --peak-tokens-s 2600 --half-at 40 \\
        --train-s 200 --publish-s 20 --max-concurrent-samples 128
    """
    from miles_core.planning.overlap import forecast

    try:
        factors = [int(part) for part in scale.split(",")]
    except ValueError:
        factors = []
    if not factors or min(factors) < 1:
        raise click.BadParameter(f"{scale!r} is not a list of whole numbers from 1 on", param_hint="--scale")
    base = _job(options)
    rows = []
    for factor in factors:
        for each in mode:
            try:
                rows.append((factor, each, forecast(replace(scaled(base, factor), mode=each))))  # type: ignore[arg-type]
            except ValueError as error:
                raise click.UsageError(f"{each}: {error}") from error
    if as_json:
        found = [{"scale": factor, "mode": each, **asdict(done)} for factor, each, done in rows]
        click.echo(json.dumps(found, indent=1))
        return
    click.echo(_table(rows))


def scaled(job: Job, factor: int) -> Job:
    """The same job on `factor` times the devices, with as much more work: each device sees what it saw before."""
    return replace(
        job,
        speed=replace(job.speed, peak=job.speed.peak * factor, half=job.speed.half * factor),
        groups_per_step=job.groups_per_step * factor,
        max_concurrent_samples=job.max_concurrent_samples * factor,
    )


def _job(options: dict[str, Any]) -> Job:
    from miles_core.planning.events import EngineSpeed
    from miles_core.planning.overlap import Job
    from miles_core.planning.workload import Workload

    workload = Workload(turns=options.pop("turns"), tokens=options.pop("tokens"), wait_s=options.pop("wait_s"))
    speed = EngineSpeed(peak=options.pop("peak_tokens_s"), half=options.pop("half_at"))
    budget = options.pop("max_concurrent_samples") or options["groups_per_step"] * options["group_size"]
    return Job(mode="sync", workload=workload, speed=speed, max_concurrent_samples=budget, **options)


def _table(rows: Sequence[tuple[int, str, Forecast]]) -> str:
    from miles_core.cli import table

    header = (
        "scale", "mode", "step s", "median", "bound", "of bound", "trainer idle", "engines idle",
        "in flight", "generating", "staleness", "refused", "tokens/s",
    )  # fmt: skip
    cells = [
        (
            str(factor),
            mode,
            f"{f.step_s:.1f}",
            f"{f.step_median_s:.1f}",
            f"{f.bound_s:.1f}",
            f"{f.efficiency:.0%}",
            f"{f.trainer_idle:.0%}",
            f"{f.engine_idle:.0%}",
            f"{f.in_flight:.0f}",
            f"{f.generating:.0f}",
            f"{f.staleness_mean:.1f} (max {f.staleness_max})",
            str(f.stale_groups),
            f"{f.tokens_per_s:,.0f}",
        )
        for factor, mode, f in rows
    ]
    return table.render(header, cells)
