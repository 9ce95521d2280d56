"""miles delta: look at published versions, check them, and build a model folder out of them."""

from __future__ import annotations

from pathlib import Path

import click

from miles_core.errors import TransportError
from miles_transports.delta import tensorfile
from miles_transports.delta.checkout import Changes, Checkout, published
from miles_transports.delta.index import BASE, VersionIndex
from miles_transports.delta.store import Store, open_store, version_names

PLACE = click.argument("place")
LINEAGE = click.option("--lineage", help="Which run's chain, where there are several; `inspect` lists them.")
BASE_FOLDER = click.option(
    "--base", required=True, type=click.Path(exists=True, path_type=Path), help="Checkpoint the run began with."
)
VISIBLE_S = 5.0


@click.group("delta")
def group() -> None:
    """Versions that transport disk-delta published to PLACE, a folder or a URL."""


@group.command("inspect")
@PLACE
def inspect(place: str) -> None:
    """List every complete version: what it builds on, how much it changes, what it weighs."""
    store = open_store(place)
    lineages = _lineages(store)
    if not lineages:
        click.echo(f"no version is published in {place}; an update that changes no byte publishes none")
    for lineage in lineages:
        click.echo(f"lineage {lineage}")
        for each in published(store, lineage):
            shards = sorted(set(each.weight_map.values()))
            mib = sum(store.size(f"{each.folder}/{shard}") for shard in shards) / 2**20
            click.echo(
                f"  v{each.version:06d}  on {_base_name(each):<14}  {each.encoding:<9}  "
                f"{len(each.weight_map):5d} tensors  {len(shards):3d} shards  {mib:9.2f} MiB  {each.checksum}"
            )


@group.command("verify")
@PLACE
@BASE_FOLDER
@LINEAGE
def verify(place: str, base: Path, lineage: str | None) -> None:
    """Apply every version in memory, tensor by tensor; exit code 1 on the first checksum that differs."""
    store = open_store(place)
    name = _lineage(store, lineage)
    folder = tensorfile.Folder(base)
    indexes = published(store, name)
    for chain in (_deltas(indexes), *((each,) for each in indexes if each.full)):
        changes = Changes(store, chain, VISIBLE_S, lambda: None)
        for tensor in sorted(changes.names):
            for _ in changes.apply(folder, tensor):
                pass  # what is wrong with it is raised
        if chain:
            kind = "full snapshot" if chain[0].full else f"{len(chain)} deltas"
            click.echo(f"ok  {kind} up to v{chain[-1].version:06d}, {len(changes.names)} tensors")


@group.command("apply")
@PLACE
@BASE_FOLDER
@click.option("--local", required=True, type=click.Path(path_type=Path), help="Folder for the copies of this host.")
@click.option("--version", type=int, help="Which version; the newest when left out.")
@LINEAGE
def apply(place: str, base: Path, local: Path, version: int | None, lineage: str | None) -> None:
    """Build the Hugging Face folder of a version and print its path; what is there already is used."""
    store = open_store(place)
    name = _lineage(store, lineage)
    found = [each for each in published(store, name) if not each.full and version in (None, each.version)]
    if not found:
        raise TransportError(
            f"version {version} is not published", expected="one that `miles delta inspect` lists", where=place
        )
    click.echo(Checkout(base, local, store, name, timeout_s=VISIBLE_S).materialise(found[-1].key))


def _base_name(each: VersionIndex) -> str:
    if each.full:
        return "nothing (full)"
    return "checkpoint" if each.base_version == BASE else f"v{each.base_version:06d}"


def _deltas(indexes: list[VersionIndex]) -> tuple[VersionIndex, ...]:
    """The chain from the checkpoint, or from the oldest full snapshot where older versions were removed."""
    deltas = [each for each in indexes if not each.full]
    if not deltas or deltas[0].base_version == BASE:
        return tuple(deltas)
    start = next((each for each in indexes if each.full), None)
    return () if start is None else (start, *(each for each in deltas if each.version > start.version))


def _lineages(store: Store) -> list[str]:
    return [name for name in store.list("") if any(True for _ in version_names(store.list(name)))]


def _lineage(store: Store, wanted: str | None) -> str:
    found = _lineages(store)
    if not found:
        raise TransportError(
            "no version is published here",
            expected="the publish_dir of a run whose weights changed",
            found="none",
            do="name the folder of transport.publish_dir; an update that changes no byte publishes nothing",
        )
    if wanted is None and len(found) == 1:
        return found[0]
    if wanted not in found or wanted is None:
        raise TransportError(
            "which lineage is not clear" if wanted is None else f"there is no lineage {wanted}",
            expected="--lineage with one of those that are there",
            found=", ".join(found),
        )
    return wanted
