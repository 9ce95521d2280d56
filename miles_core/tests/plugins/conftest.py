"""Throw-away distributions: a module and its metadata in a folder that is on the path for one test."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, distributions
from pathlib import Path

import pytest

from miles_core.capability import ENTRY_POINT_GROUP

Install = Callable[..., None]
EntryPoints = Callable[[], list[EntryPoint]]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is importable during the test; what was imported from it is forgotten afterwards."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delenv("MILES_DISABLE_PLUGINS", raising=False)
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def install(site: Path) -> Install:
    """`install(dist, source)`: a distribution whose plugin module holds the source."""

    def write(dist: str, source: str, *, requires: tuple[str, ...] = (), extras: tuple[str, ...] = ()) -> None:
        module = dist.replace("-", "_") + "_plugin"
        (site / f"{module}.py").write_text(textwrap.dedent(source))
        info = site / f"{dist.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {dist}", "Version: 1.0"]
        lines += [f"Provides-Extra: {extra}" for extra in extras]
        lines += [f"Requires-Dist: {each}" for each in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{dist}-entry = {module}\n")

    return write


@pytest.fixture
def entry_points(site: Path) -> EntryPoints:
    """Entry points of what `install` wrote, and of nothing else."""

    def read() -> list[EntryPoint]:
        found = distributions(path=[str(site)])
        return [each for dist in found for each in dist.entry_points if each.group == ENTRY_POINT_GROUP]

    return read
