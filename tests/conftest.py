"""A whole run on a tiny random model: a few seconds on one core."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from miles_core.testing import preloaded

REWARD = '''
"""Rewards answers with many lower-case letters; learnable by a random model."""


def score(scored):
    text = scored.response
    return sum(c.islower() for c in text) / max(len(text), 1)
'''

RUN_FILE = """
name: tiny
seed: 7
model: {folder}/model
data: {{train: {folder}/train.jsonl, eval: {folder}/eval.jsonl}}
rewards: ['{folder}/reward.py:score']
rollout: {{sampling: {{max_tokens: 6}}, reward_workers: 1}}
schedule: {{steps: 4, groups_per_step: 2, group_size: 3}}
optimizer: {{lr: 1.0e-2}}
eval: {{every_steps: 2, prompts: 2, sampling: {{temperature: 0, max_tokens: 4}}}}
checkpoint: {{every_steps: 1, export_hf: false}}
placement: {{device: cpu}}
tracking: {{dir: {folder}/runs, trackers: []}}
"""


@dataclass(frozen=True)
class Workspace:
    """A folder with model, data, reward and run-file; runs `miles train` in processes of its own."""

    folder: Path

    @property
    def run_file(self) -> Path:
        return self.folder / "run.yaml"

    def directory(self, name: str = "tiny") -> Path:
        return self.folder / "runs" / name

    def command(self, *arguments: str, overrides: dict[str, Any] | None = None) -> list[str]:
        return [sys.executable, "-m", "miles_core.cli", *self.arguments(*arguments, overrides=overrides)]

    def arguments(self, *arguments: str, overrides: dict[str, Any] | None = None) -> list[str]:
        sets = [part for key, value in (overrides or {}).items() for part in ("--set", f"{key}={json.dumps(value)}")]
        return ["train", str(self.run_file), "--plain", *sets, *arguments]

    def train(
        self, *arguments: str, overrides: dict[str, Any] | None = None, code: int | None = 0, timeout_s: float = 240
    ) -> subprocess.CompletedProcess[str]:
        done = preloaded.run(self.arguments(*arguments, overrides=overrides), timeout_s)
        if code is not None:
            assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def struck(
        self, number: signal.Signals, after: int, *arguments: str, name: str = "", overrides: dict[str, Any]
    ) -> int | None:
        """Train in a process that strikes itself with a signal after so many changes to files of its run directory, or
        to the one called `name`. Its exit code."""
        blow = preloaded.Blow(number, after, str(self.directory()), name)
        run = preloaded.start(self.arguments(*arguments, overrides=overrides), blow=blow)
        run.join(240)
        if run.exitcode is None:
            run.kill()
            run.join()
            raise AssertionError("the run goes on and on")
        return run.exitcode

    def lines(self, file: str = "metrics.jsonl", name: str = "tiny") -> list[dict[str, Any]]:
        from miles_core.tracking.run_dir import read_lines

        return list(read_lines(self.directory(name) / file))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from miles_core.testing.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", seed=0)


@pytest.fixture
def workspace(tmp_path: Path, tiny_model: Path) -> Workspace:
    return make_workspace(tmp_path, tiny_model)


@pytest.fixture(scope="module")
def make_workspace_here(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Callable[[], Workspace]:
    return lambda: make_workspace(tmp_path_factory.mktemp("run"), tiny_model)


def make_workspace(folder: Path, model: Path) -> Workspace:
    (folder / "model").symlink_to(model, target_is_directory=True)
    (folder / "reward.py").write_text(REWARD)
    for split, words in (("train", ("one", "two", "three", "four", "five")), ("eval", ("six", "seven"))):
        rows = [{"prompt": f"say {word}", "label": word} for word in words]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text(RUN_FILE.format(folder=folder))
    return Workspace(folder)
