"""Weights leave a run as a Hugging Face folder; the self-check names the piece at fault."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

from miles_core.testing import preloaded

if TYPE_CHECKING:
    from .conftest import Workspace


def miles(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return preloaded.run(arguments, timeout_s=240, **variables)


def test_the_last_checkpoint_converts_to_the_weights_the_run_exported(workspace: Workspace) -> None:
    from safetensors.torch import load_file

    workspace.train(overrides={"schedule.steps": 2, "checkpoint.export_hf": True})
    run, output = workspace.directory(), workspace.folder / "hf"
    done = miles("convert", str(run), str(output))
    assert done.returncode == 0, done.stderr
    exported, converted = (load_file(folder / "model.safetensors") for folder in (run / "hf", output))
    first = workspace.folder / "hf-1"
    assert miles("convert", str(run), str(first), "--step", "1").returncode == 0
    earlier = load_file(first / "model.safetensors")
    assert exported.keys() == converted.keys()
    assert all((exported[name] == converted[name]).all() for name in exported)
    assert any((earlier[name] != converted[name]).any() for name in converted)

    again = miles("convert", str(run), str(output))
    assert (again.returncode, "exists already" in again.stderr) == (1, True)
    absent = miles("convert", str(run), str(workspace.folder / "x"), "--step", "9")
    assert absent.returncode == 1
    assert "step_000009" in absent.stderr


def test_the_self_check_passes_every_grade_here() -> None:
    done = miles("check", "--json")
    outcomes = json.loads(done.stdout)
    assert [outcome["name"] for outcome in outcomes] == ["environment", "trainer", "engine", "toy step"]
    assert all(outcome["ok"] for outcome in outcomes), outcomes
    assert done.returncode == 0


def test_the_self_check_names_the_piece_that_is_missing() -> None:
    done = miles("check", "--json", MILES_DISABLE_PLUGINS="miles-fsdp")
    outcomes = {outcome["name"]: outcome for outcome in json.loads(done.stdout)}
    assert done.returncode == 1
    assert not outcomes["trainer"]["ok"]
    assert "fsdp" in outcomes["trainer"]["detail"]
    assert outcomes["environment"]["ok"]
