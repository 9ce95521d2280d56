"""Where `p2p` and `disk-delta` are refused before anything starts."""

from __future__ import annotations

import os
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from miles_core.config.load import Source
from miles_core.config.resolve import check_run
from miles_core.errors import TransportError
from miles_core.registry import discover
from miles_core.rules import Facts
from miles_transports import rules
from miles_transports.delta.store import open_store
from miles_transports.plugin import P2P_RULES


def broken_rules(
    transport: Any = "p2p", model: str = "model", executor: str = "inprocess", files: bool = True, **placement: Any
) -> set[str]:
    tree = {
        "name": "x",
        "model": model,
        "data": "train.jsonl",
        "rewards": [{"use": "http", "url": "http://127.0.0.1:1/score"}],
        "transport": transport,
        "executor": executor,
        "schedule": {"steps": 1},
        "placement": placement,
    }
    _, problems = check_run(Source(path=None, text="", tree=tree), discover(), files=files)
    return {problem.rule or "" for problem in problems}


def test_colocated_sides_are_refused() -> None:
    assert "p2p-separate" in broken_rules(mode="colocated")
    assert "p2p-separate" not in broken_rules(mode="separate")


def test_a_machine_without_mooncake_is_told_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    real = util.find_spec
    monkeypatch.setattr("miles_transports.rules.find_spec", lambda name: None if name == "mooncake" else real(name))
    assert "p2p-mooncake" in broken_rules(mode="separate")
    assert "p2p-mooncake" not in broken_rules(mode="separate", files=False)  # for another machine


def test_a_machine_where_mooncake_cannot_be_loaded_is_told_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    missing = "libibverbs.so.1: cannot open shared object file: No such file or directory"
    (tmp_path / "mooncake" / "engine.py").write_text(f"raise ImportError({missing!r})")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    rules._import_refused.cache_clear()
    monkeypatch.setattr("miles_transports.rules.find_spec", lambda name: object())
    (found,) = rules.mooncake_is_here(Facts(values={}))
    assert found.found.endswith(f"ImportError: {missing}")
    monkeypatch.undo()
    rules._import_refused.cache_clear()
    (rule,) = [each for each in P2P_RULES if each.id == "p2p-mooncake"]
    assert "libibverbs1" in rule.instead


@pytest.mark.parametrize(("ranks", "fits"), [(1, True), (2, True), (3, False)])
def test_ranks_that_do_not_divide_the_model_are_refused(tmp_path: Path, ranks: int, fits: bool) -> None:
    save_file({"model.layers.0.self_attn.q_proj.weight": torch.zeros(8, 4)}, tmp_path / "model.safetensors")
    pick = {"use": "p2p", "layout": "fused", "engine_ranks": ranks}
    broken = broken_rules(pick, str(tmp_path), mode="separate")
    assert ("p2p-ranks-divide" not in broken) is fits


@pytest.mark.parametrize(
    ("place", "opens"),
    [
        ("/shared/weights", True),
        ("memory://weights", True),
        ("simplecache::memory://weights", True),
        ("nosuch://weights", False),
    ],
)
def test_a_url_that_fsspec_cannot_open_is_refused(place: str, opens: bool) -> None:
    assert ("disk-delta-url" not in broken_rules(disk_delta(place))) is opens


def test_a_scheme_whose_package_is_missing_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.registry import known_implementations

    needs = {"class": "nosuchfs.Files", "err": "Install nosuchfs"}
    monkeypatch.setitem(known_implementations, "bucket", needs)
    assert "disk-delta-url" in broken_rules(disk_delta("bucket://weights"))
    with pytest.raises(TransportError, match=r"Install nosuchfs(.|\n)*bucket://weights(.|\n)*pip install"):
        open_store("bucket://weights")


def test_urls_need_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles_transports.rules.find_spec", lambda name: None)
    assert "disk-delta-url" in broken_rules(disk_delta("memory://weights"))
    assert "disk-delta-url" not in broken_rules(disk_delta("/shared/weights"))


@pytest.mark.parametrize(
    ("published", "local", "apart"),
    [
        ("{0}/a", "{0}/b", True),
        ("{0}/weights", "{0}/weights-here", True),
        ("s3://bucket{0}/a", "{0}/a", True),
        ("{0}/a", "{0}/a", False),
        ("{0}/a", "{0}/b/../a/", False),
        ("{0}/a", "{0}/a/local", False),
        ("{0}/b/published", "{0}/b", False),
        ("file://{0}/a", "{0}/a", False),
        ("{0}/a", "{0}/link/inside", False),
        ("a", "{0}/a", False),
    ],
)
def test_the_two_folders_of_disk_delta_are_not_one_inside_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: str, local: str, apart: bool
) -> None:
    monkeypatch.chdir(tmp_path)  # where relative paths of a run-file start
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    pick = disk_delta(published.format(tmp_path), local.format(tmp_path))
    assert ("disk-delta-folders" not in broken_rules(pick)) is apart


def test_folders_of_disk_delta_can_be_made_and_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(published: str, local: str, **more: Any) -> bool:
        return "disk-delta-writable" in broken_rules(disk_delta(published, local), **more)

    (tmp_path / "file").touch()
    later, inside_a_file = str(tmp_path / "made" / "later"), str(tmp_path / "file" / "x")
    assert not refused(later, str(tmp_path / "local"))
    assert not (tmp_path / "made").exists()
    assert not refused("memory://weights", str(tmp_path / "local"))
    assert refused(inside_a_file, later)
    assert refused(later, inside_a_file)
    assert not refused(later, inside_a_file, executor="ray")  # hosts of engines may be others
    assert not refused(inside_a_file, later, files=False)
    monkeypatch.setattr("miles_transports.rules.os.access", lambda place, mode: place != tmp_path)
    assert refused(later, "/nvme/weights")


def disk_delta(place: str, local: str = "/nvme/weights") -> dict[str, str]:
    return {"use": "disk-delta", "publish_dir": place, "local_dir": local}
