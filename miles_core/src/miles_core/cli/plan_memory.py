"""`miles plan memory`: bytes of the fullest rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

FSDP_CHUNK = 1024
"""What the fsdp backend computes at a time unless told otherwise."""


@click.command("memory")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--backend", type=click.Choice(["megatron", "fsdp"]), default="fsdp", show_default=True)
@click.option("--gpus", type=click.IntRange(1), default=1, show_default=True, help="Trainer ranks.")
@click.option("--tp", type=click.IntRange(1), default=1, help="Tensor parallel size (megatron).")
@click.option("--pp", type=click.IntRange(1), default=1, help="Pipeline stages (megatron).")
@click.option("--cp", type=click.IntRange(1), default=1, help="Context parallel size (megatron).")
@click.option("--ep", type=click.IntRange(1), default=1, help="Expert parallel size (megatron).")
@click.option("--etp", type=click.IntRange(1), default=1, help="Tensor parallel size of experts (megatron).")
@click.option("--stages", help="Layers of each stage, as 18,20,20,20 (megatron).")
@click.option("--sequence-parallel", is_flag=True, help="(megatron)")
@click.option("--no-distributed-optimizer", is_flag=True, help="(megatron)")
@click.option("--micro-batch-tokens", type=click.IntRange(1), default=4096, show_default=True)
@click.option("--logits-chunk-tokens", type=click.IntRange(1), help="Tokens whose logits exist at one time.")
@click.option("--no-recompute", is_flag=True, help="Keep all activations.")
@click.option("--precision", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
@click.option("--reference", is_flag=True, help="A reference policy stays in memory.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def command(model: Path, backend: str, gpus: int, stages: str | None, as_json: bool, **options: Any) -> None:
    """Plan the memory of the fullest rank that trains MODEL, a Hugging Face folder; config.json alone is enough."""
    from miles_core.cli import table
    from miles_core.config.model_folder import ModelFolderError
    from miles_core.errors import ConfigError
    from miles_core.plan import show_bytes
    from miles_core.planning import memory
    from miles_core.planning.sizes import read_sizes

    work = memory.Work(
        micro_batch_tokens=options["micro_batch_tokens"],
        recompute=not options["no_recompute"],
        logits_chunk_tokens=options["logits_chunk_tokens"] or (FSDP_CHUNK if backend == "fsdp" else None),
        precision=options["precision"],
        reference=options["reference"],
    )
    degrees = {name: options[name] for name in ("tp", "pp", "cp", "ep", "etp")}
    if backend == "fsdp" and (given := [f"--{name}" for name, size in degrees.items() if size != 1]):
        raise click.UsageError(f"{', '.join(given)} divide a model for --backend megatron; fsdp shards it over --gpus")
    try:
        sizes = read_sizes(model)
        if backend == "fsdp":
            rank = memory.fsdp(sizes, gpus, work)
        else:
            layout = memory.Layout(
                gpus=gpus,
                **degrees,
                stages=tuple(int(part) for part in stages.split(",")) if stages else None,
                sequence_parallel=options["sequence_parallel"],
                distributed_optimizer=not options["no_distributed_optimizer"],
            )
            rank = memory.megatron(sizes, layout, work)
    except (ModelFolderError, ValueError) as error:
        raise ConfigError(
            "this memory cannot be planned",
            found=str(error),
            where=str(model),
            do="name a folder with config.json, and sizes and --stages that divide that model",
        ) from error
    if as_json:
        items = {item.what: item.num_bytes for item in rank.items}
        click.echo(json.dumps({"stage": rank.stage, "items": items, "total": rank.total}, indent=1))
        return
    rows = [(item.what, show_bytes(item.num_bytes), f"{item.num_bytes / rank.total:.0%}") for item in rank.items]
    place = f"pipeline stage {rank.stage}" if backend == "megatron" and degrees["pp"] > 1 else "each rank"
    click.echo(f"{model}: {sizes.total / 1e9:,.2f} B parameters, {sum(sizes.experts) / 1e9:,.2f} B in routed experts")
    click.echo(table.render((place, "", ""), [*rows, ("together", show_bytes(rank.total), "")]))
