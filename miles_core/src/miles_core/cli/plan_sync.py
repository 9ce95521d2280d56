"""`miles plan sync`: which transport stops generation for how long."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from miles_core.cli.numbers import Finite


@click.command("sync")
@click.option("--model", type=click.Path(path_type=Path), help="Hugging Face folder whose weights travel.")
@click.option("--gigabytes", type=Finite(0, min_open=True), help="Weights in GB (1e9), instead of --model.")
@click.option("--trainer-nodes", type=click.IntRange(1), default=1, show_default=True)
@click.option("--trainer-pp", type=click.IntRange(1), default=1, show_default=True, help="Pipeline stages.")
@click.option("--engine-nodes", type=click.IntRange(1), default=1, show_default=True)
@click.option("--engines", type=click.IntRange(1), default=1, show_default=True, help="Replicas that serve.")
@click.option(
    "--fabric",
    type=click.Choice(["shared-device", "network", "storage"]),
    default="network",
    show_default=True,
    help="What trainer and engines have in common.",
)
@click.option("--density", type=Finite(0, 1), default=0.02, show_default=True, help="Delta over full bytes.")
@click.option("--post-load-s", type=Finite(0), default=0.0, help="Engine's work after a P2P update.")
@click.option("--nic-gb-s", type=Finite(0, min_open=True), default=50.0, show_default=True)
@click.option("--nics-per-node", type=click.IntRange(1), default=8, show_default=True)
@click.option("--storage-gb-s", type=Finite(0, min_open=True), default=2.0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def command(model: Path | None, gigabytes: float | None, as_json: bool, **options: Any) -> None:
    """Forecast a weight update by each transport that can work, and recommend one."""
    from miles_core.cli import table
    from miles_core.plan import show_bytes
    from miles_core.planning import sync

    if (model is None) == (gigabytes is None):
        raise click.UsageError("give either --model or --gigabytes")
    if options["fabric"] == "shared-device" and options["engine_nodes"] != 1:
        raise click.UsageError("--engine-nodes: with --fabric shared-device the engines are on the trainer's nodes")
    if model is not None:
        num_bytes = _bytes_of(model)
    else:
        assert gigabytes is not None
        num_bytes = gigabytes * sync.GB
    links = sync.Links(
        nic=options.pop("nic_gb_s"), nics_per_node=options.pop("nics_per_node"), storage=options.pop("storage_gb_s")
    )
    found = sync.estimates(sync.Topology(model_bytes=num_bytes, **options), links)
    if as_json:
        estimates = [{**asdict(each), "total_s": each.total_s} for each in found]
        click.echo(json.dumps({"estimates": estimates, "recommendation": found[0].transport}, indent=1))
        return
    rows = [
        (
            each.transport,
            f"{each.prepare_s:.2f}",
            f"{each.pause_s:.2f}",
            show_bytes(round(each.wire_bytes)),
            each.because,
        )
        for each in found
    ]
    click.echo(table.render(("transport", "prepare s", "pause s", "wire", "most time goes into"), rows))
    click.echo(f"\n{sync.recommend(found)}")


def _bytes_of(model: Path) -> float:
    from miles_core.config.model_folder import ModelFolderError, read_config
    from miles_core.errors import ConfigError
    from miles_core.planning.sizes import read_sizes

    try:
        config = read_config(model)
        element = 4 if "32" in str(config.get("dtype", config.get("torch_dtype"))) else 2
        return float(read_sizes(model).total * element)
    except (ModelFolderError, ValueError) as error:
        raise ConfigError(
            "the bytes of this model are not known",
            found=str(error),
            where=str(model),
            do="name a folder with config.json, or give --gigabytes",
        ) from error
