"""The W&B tracker against a stand-in for the package; with the real one installed the offline test runs too."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from miles_core.errors import PluginError
from miles_core.testing.tracker import TrackerConformance
from miles_wandb.options import WandbOptions

REAL = importlib.util.find_spec("wandb") is not None
STAND_IN = Path(__file__).parent / "stand_in"


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """`import wandb` finds the stand-in for the length of a test."""
    monkeypatch.syspath_prepend(str(STAND_IN))
    for name in ("wandb", "miles_wandb.tracker"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("wandb")
    for name in ("wandb", "miles_wandb.tracker"):
        sys.modules.pop(name, None)


def make(folder: Path, **options: Any) -> Any:
    from miles_wandb.tracker import WandbTracker

    return WandbTracker(WandbOptions(**options), folder, "quick", {"seed": 3})


def lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for file in folder.glob("wandb-*.jsonl") for line in file.read_text().splitlines()]


class TestConformance(TrackerConformance):
    def make(self, tmp_path: Path) -> Any:
        return make(tmp_path)

    def recorded(self, tmp_path: Path) -> dict[int, dict[str, float]]:
        return {
            int(line["step"]): {name: value for name, value in line.items() if name != "step"}
            for line in lines(tmp_path)
            if len(line) > 1
        }


def test_a_resumed_run_continues_its_wandb_run_and_records_steps_again(tmp_path: Path) -> None:
    first = make(tmp_path)
    for step in (1, 2, 3):
        first.record(step, {"train/loss": float(step)})
    first.close()
    second = make(tmp_path)  # resumed from the checkpoint of step 1
    second.record(2, {"train/loss": 20.0})
    second.close()
    assert len(list(tmp_path.glob("wandb-*.jsonl"))) == 1
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 2]


def test_every_chart_uses_the_recorded_step_as_its_axis(tmp_path: Path) -> None:
    tracker = make(tmp_path, project="p", tags=("a",))
    assert tracker._run.settings["metrics"] == {"step": None, "*": "step"}
    assert tracker._run.settings["config"] == {"seed": 3}
    assert tracker._run.settings["project"] == "p"
    tracker.close()


def test_values_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    tracker = make(tmp_path)
    tracker.record(1, {"a": float("nan"), "b": 1.0})
    tracker.close()
    assert lines(tmp_path) == [{"step": 1, "b": 1.0}]


def test_a_start_that_fails_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="wandb login"):
        make(tmp_path, entity="nobody")


def test_the_declaration_does_not_import_wandb() -> None:
    code = "import sys, miles_wandb.plugin, miles_wandb.options; assert 'wandb' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


@pytest.mark.skipif(not REAL, reason="wandb is not installed")
def test_the_real_package_takes_an_offline_run(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from miles_wandb.options import WandbOptions;"
        "from miles_wandb.tracker import WandbTracker;"
        "t = WandbTracker(WandbOptions(mode='offline'), Path(sys.argv[1]), 'quick', {'seed': 1});"
        "t.record(1, {'a': 1.0}); t.record(2, {'a': 2.0}); t.close()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
