"""What can be known to fail on this machine or with this model, checked before anything starts."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from miles_core.config.files import absolute
from miles_core.rules import Facts, Finding


def mooncake_is_here(facts: Facts) -> Iterable[Finding]:
    """The module is installed, and what it is linked with, too."""
    if not facts.here:
        return
    if find_spec("mooncake") is None:
        yield Finding(path="transport", found="there is no module `mooncake` here")
    elif refused := _import_refused("mooncake.engine"):
        yield Finding(path="transport", found=f"`mooncake.engine` cannot be imported here: {refused}")


@functools.cache
def _import_refused(module: str) -> str:
    """Why the module cannot be imported, empty if it can: tried in a process of its own, since it starts threads."""
    tried = subprocess.run(
        [sys.executable, "-c", f"import {module}"], capture_output=True, text=True, timeout=120, check=False
    )
    if tried.returncode == 0:
        return ""
    return (tried.stderr.strip().splitlines() or [f"the process ended with {tried.returncode}"])[-1]


def url_opens(facts: Facts) -> Iterable[Finding]:
    """fsspec knows the scheme, and what it needs for it is installed."""
    place = str(facts.values.get("transport.publish_dir", ""))
    if "://" not in place:
        return
    if find_spec("fsspec") is None:
        yield Finding(path="transport.publish_dir", found=f"{place} is a URL, and there is no module `fsspec` here")
        return
    import fsspec

    try:
        fsspec.get_filesystem_class(place.rpartition("::")[2].partition("://")[0])
    except (ValueError, ImportError) as error:
        yield Finding(path="transport.publish_dir", found=f"{place}: {error}")


def folders_are_apart(facts: Facts) -> Iterable[Finding]:
    """Hosts build and remove in one of the two what the trainer and other hosts must not meet in the other."""
    places = [facts.values.get(f"transport.{name}") for name in ("publish_dir", "local_dir")]
    published, local = (_folder(str(place)) for place in places)
    if published is None or local is None or None in places:
        return
    if published == local:
        found = f"both folders are {local}"
    elif published in local.parents:
        found = f"{local} is inside publish_dir, {published}"
    elif local in published.parents:
        found = f"publish_dir, {published}, is inside {local}"
    else:
        return
    yield Finding(path="transport.local_dir", found=found)


def folders_are_writable(facts: Facts) -> Iterable[Finding]:
    """As far as this can be told without making them. Copies are made where the engines are, perhaps elsewhere."""
    names = ["publish_dir", "local_dir"]
    if "places-processes" in facts.tags.get("executor", ()):
        names.remove("local_dir")
    for name in names if facts.here else ():
        place = _folder(str(facts.values.get(f"transport.{name}", "")))
        if place is not None and (refused := _refused(place)):
            yield Finding(path=f"transport.{name}", found=refused)


def _refused(place: Path) -> str | None:
    """Why a folder cannot be made and written to."""
    at = next(each for each in (place, *place.parents) if os.path.lexists(each))
    if not at.is_dir():
        return f"{at} is no folder"
    return None if os.access(at, os.W_OK | os.X_OK) else f"{at} cannot be written to"


def _folder(place: str) -> Path | None:
    """Where a place is on this host, links followed; None of an object store's."""
    scheme, separator, path = place.rpartition("://")
    return absolute(path).resolve() if not separator or scheme in ("file", "local") else None


def ranks_divide_the_model(facts: Facts) -> Iterable[Finding]:
    """Fused parameters are cut evenly. Silent about weights that cannot be read: others report them."""
    size = facts.values.get("transport.engine_ranks", 1)
    if not isinstance(size, int) or size == 1:
        return
    from miles_core.errors import TransportError
    from miles_transports.delta.tensorfile import Folder
    from miles_transports.p2p.replica import FUSED

    try:
        folder = Folder(absolute(str(facts.values.get("model.path"))))
    except (TransportError, OSError):
        return
    for name in folder.where:
        shape = folder.entry(name).shape
        axis = FUSED.axis_of(name)
        if axis is not None and shape[axis] % size:
            yield Finding(
                path="transport.engine_ranks", found=f"{size} ranks for {shape[axis]} along axis {axis} of {name}"
            )
            return
