"""Where `p2p` is refused before anything starts."""

from __future__ import annotations

from importlib import util
from typing import Any

import pytest

from miles_core.config.load import Source
from miles_core.config.resolve import check_run
from miles_core.registry import discover


def broken_rules(**placement: Any) -> set[str]:
    tree = {
        "name": "x",
        "model": "model",
        "data": "train.jsonl",
        "rewards": [{"use": "http", "url": "http://127.0.0.1:1/score"}],
        "transport": "p2p",
        "schedule": {"steps": 1},
        "placement": placement,
    }
    _, problems = check_run(Source(path=None, text="", tree=tree), discover(), files=False)
    return {problem.rule or "" for problem in problems}


def test_colocated_sides_are_refused() -> None:
    assert "p2p-separate" in broken_rules(mode="colocated")
    assert "p2p-separate" not in broken_rules(mode="separate")


def test_a_machine_without_mooncake_is_told_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    real = util.find_spec
    monkeypatch.setattr(
        "miles_transports.p2p.present.find_spec", lambda name: None if name == "mooncake" else real(name)
    )
    assert "p2p-mooncake" in broken_rules(mode="separate")
