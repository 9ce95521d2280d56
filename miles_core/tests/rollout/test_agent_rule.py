"""An agent that cannot be started is refused before anything is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from miles_core.config.load import Source
from miles_core.config.resolve import check_run
from miles_core.registry import discover

REGISTRY = discover()


def refused(files: bool = True, **agent: Any) -> list[tuple[str, str]]:
    """(path, message) of what the rule says of an agent."""
    tree = {
        "name": "x",
        "model": "model",
        "data": "train.jsonl",
        "environment": {"use": "agent", **agent},
        "schedule": {"steps": 1},
    }
    _, problems = check_run(Source(path=None, text="", tree=tree), REGISTRY, files=files)
    return [(problem.path, problem.message) for problem in problems if problem.rule == "agent-starts"]


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "agents.py").write_text("import json\nimport nosuch\n\nasync def play(task): ...\n")
    (tmp_path / "sound.py").write_text("import json\n\nasync def play(task): ...\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "agent").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "agent").chmod(0o755)
    (tmp_path / "bin" / "notes").write_text("no program")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("agent", "path", "message"),
    [
        ({"function": "agents.py:play"}, "function", "imports `nosuch`, and there is no such module here"),
        ({"function": "agents.py:plya"}, "function", "no `plya` in it; it defines play"),
        ({"function": "absent.py:play"}, "function", "does not exist"),
        ({"function": "nosuch:play"}, "function", "there is no module `nosuch` here"),
        ({"command": "nosuch --fast"}, "command", "there is no program nosuch"),
        ({"command": "bin/notes"}, "command", "there is no program bin/notes"),
        ({"command": "./agent", "cwd": "."}, "command", "there is no program ./agent"),
        ({"command": "agent", "cwd": "bin"}, "command", "there is no program agent"),
        ({"command": "agent 'x"}, "command", "No closing quotation in the command"),
        ({"command": " "}, "command", "the command is blank"),
        ({"command": "true", "cwd": "absent"}, "cwd", "there is no folder absent"),
        ({"command": "true", "env": {"PATH": "/nowhere"}}, "command", "there is no program true"),
    ],
)
def test_what_is_missing_is_named(agent: dict[str, Any], path: str, message: str) -> None:
    ((where, said),) = refused(**agent)
    assert where == f"environment.{path}"
    assert message in said
    assert refused(files=False, **agent) == [], "a run that is not started here needs no agent here"


@pytest.mark.parametrize(
    "agent",
    [
        {"function": "sound.py:play"},
        {"function": "json:loads"},
        {"command": "true"},
        {"command": "bin/agent --fast 'a b'"},
        {"command": "./agent", "cwd": "bin"},
        {"command": "agent", "env": {"PATH": "bin"}},
    ],
)
def test_an_agent_that_can_be_started_passes(agent: dict[str, Any]) -> None:
    assert refused(**agent) == []
