"""miles delta: look at published versions, check them, and build a model folder out of them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import click

from miles_core.errors import TransportError
from miles_transports.delta import tensorfile
from miles_transports.delta.chain import Changes
from miles_transports.delta.checkout import Checkout, published
from miles_transports.delta.index import BASE, CHECKPOINT, VersionIndex
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
    if not lineages and "://" not in place and not Path(place).is_dir():
        raise TransportError(
            "there is no such folder", where=place, do="name the folder of a run's transport.publish_dir, or its URL"
        )
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
    """Apply every version in memory, tensor by tensor; exit code 1 on the first checksum that differs, and when a
    version builds on one that is not there."""
    store = open_store(place)
    indexes = published(store, _lineage(store, lineage))
    unchecked, chain = _chain(indexes)
    folder = tensorfile.Folder(base)
    for each in unchecked:
        click.echo(f"unchecked  v{each.version:06d}: v{each.base_version:06d}, which it changes, was removed")
    for versions in ((each,) for each in indexes if each.full):
        _verify(store, versions, folder)
    if chain:
        _verify(store, chain, folder)


def _verify(store: Store, chain: tuple[VersionIndex, ...], folder: tensorfile.Folder) -> None:
    changes = Changes(store, chain, VISIBLE_S, lambda: None)
    for tensor in sorted(changes.names):
        for _ in changes.apply(folder, tensor):
            pass  # what is wrong with it is raised
    deltas = sum(not each.full for each in chain)
    what = "full snapshot" if not deltas else f"{deltas} deltas" + (" on a full snapshot" if chain[0].full else "")
    click.echo(f"ok  {what} up to v{chain[-1].version:06d}, {len(changes.names)} tensors")


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


def _chain(indexes: list[VersionIndex]) -> tuple[tuple[VersionIndex, ...], tuple[VersionIndex, ...]]:
    """The deltas that only a host with an older version can use, and the chain that everybody can.

    The oldest versions may have been removed once a full snapshot stood; then the chain begins with the oldest one.

    Raises:
        TransportError: a version is missing between two others, or the oldest delta has nothing to stand on.
    """
    deltas = [each for each in indexes if not each.full]
    for before, after in pairwise(deltas):
        if after.base != before.key:
            raise _missing(after, f"version {before.version} with index {before.digest} is the one before it")
    if not deltas or deltas[0].base == CHECKPOINT:
        return (), tuple(deltas)
    start = next((each for each in indexes if each.full), None)
    if start is None:
        raise _missing(deltas[0], "neither that version nor a full snapshot")
    older = tuple(each for each in deltas if each.version <= start.version)
    return older, (start, *deltas[len(older) :]) if len(older) < len(deltas) else ()


def _missing(delta: VersionIndex, found: str) -> TransportError:
    return TransportError(
        f"version {delta.version} builds on a version that is not there",
        expected=f"version {delta.base_version} with index {delta.base_digest}",
        found=found,
        where=delta.folder,
        do="put the missing folder back, or let the run publish a full snapshot (transport.snapshot_every)",
    )


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
