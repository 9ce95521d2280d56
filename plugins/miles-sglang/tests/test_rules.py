"""Options that nothing would read, or that no server could do, are refused before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from miles_core.registry import load_target
from miles_core.rules import evaluate, facts_of
from miles_sglang.options import SglangOptions
from miles_sglang.plugin import miles_engines
from miles_sglang.rules import sglang_is_there

ONE = ["http://a:1"]


def fired(engine: dict[str, Any], *, engines: int = 1, verify: str = "off", min_p: float = 0.0) -> list[str]:
    """Ids of the rules that fire for these options."""
    (capability,) = miles_engines()
    options = SglangOptions.model_validate(engine).model_dump(mode="json")
    sections = {
        "engine": options,
        "placement": {"engines": engines},
        "weights": {"verify": verify},
        "rollout": {"sampling": {"min_p": min_p}},
    }
    rules = [(rule, "miles-sglang") for rule in capability.rules]
    return [violation.rule.id for violation in evaluate(rules, facts_of(sections, {}, here=False), load_target)]


@pytest.mark.parametrize(
    ("engine", "others"),
    [
        ({}, {"verify": "always"}),
        ({"urls": [*ONE, "http://b:1"]}, {"engines": 2, "verify": "always"}),
        ({"python": "/x", "env": {"A": "1"}, "server_args": {"attention_backend": "triton"}}, {}),
        ({"update": "distributed", "backend": "nccl", "tensor_parallel": 12}, {}),
        ({}, {"min_p": 0.1}),
        ({"urls": ONE, "start_timeout_s": 5.0}, {}),
    ],
)
def test_sound_options_pass(engine: dict[str, Any], others: dict[str, Any]) -> None:
    assert fired(engine, **others) == []


@pytest.mark.parametrize(
    ("rule", "engine", "others"),
    [
        *(
            ("sglang-attached-not-started", {"urls": ONE, **option}, {})
            for option in (
                {"python": "/x"}, {"module": "x"}, {"python_path": ["/x"]}, {"env": {"A": "1"}}, {"log_dir": "/x"},
                {"server_args": {"attention_backend": "triton"}}, {"memory_fraction": 0.5}, {"max_running_requests": 3},
            )
        ),
        ("sglang-addresses", {"urls": ONE}, {"engines": 2}),
        ("sglang-addresses", {"urls": [*ONE, "http://b:1", "http://c:1"]}, {}),
        ("sglang-addresses", {"urls": [*ONE, "http://a:1/"]}, {"engines": 2}),
        ("sglang-addresses", {"urls": ["127.0.0.1:30000"]}, {}),
        ("sglang-backend-distributed", {"backend": "nccl"}, {}),
        ("sglang-backend-distributed", {"backend": "nccl", "update": "tensor"}, {}),
        ("sglang-digests-one-rank-2", {"tensor_parallel": 12}, {"verify": "always"}),
        ("sglang-digests-one-rank-2", {"tensor_parallel": 2}, {"verify": "sampled"}),
        ("sglang-deterministic-min-p", {"deterministic": True}, {"min_p": 0.1}),
    ],
)  # fmt: skip
def test_each_other_is_refused_by_its_rule(rule: str, engine: dict[str, Any], others: dict[str, Any]) -> None:
    assert fired(engine, **others) == [rule]


def missing(engine: dict[str, Any], **facts: Any) -> list[str]:
    """What the rule `sglang-starts` says of these options."""
    options = SglangOptions.model_validate(engine).model_dump(mode="json")
    told = facts_of({"engine": options}, facts.pop("tags", {}), **facts)
    return [finding.found for finding in sglang_is_there(told)]


THERE: dict[str, Any] = {"module": "json.tool"}
ABSENT: dict[str, Any] = {"module": "nosuch_server.launch"}


@pytest.mark.parametrize(
    ("engine", "found"),
    [
        (THERE, None),
        ({**THERE, "python": sys.executable}, None),
        (ABSENT, f"{sys.executable} has no module `nosuch_server`"),
        ({**THERE, "python": "/opt/nowhere/bin/python"}, "there is no program /opt/nowhere/bin/python"),
        ({**THERE, "python": "python3", "env": {"PATH": "/nowhere"}}, "there is no program python3"),
        ({**THERE, "python": "false"}, "is no Python: exit code 1"),
        ({**THERE, "python": "true"}, "is no Python: exit code 0"),
        ({**THERE, "env": {"A=B": "1"}}, "illegal environment variable name"),
        ({**ABSENT, "urls": ONE}, None),
    ],
)
def test_an_interpreter_without_sglang_is_refused_before_the_run(engine: dict[str, Any], found: str | None) -> None:
    said = missing(engine)
    assert len(said) == (found is not None)
    assert found is None or found in said[0]


def test_sglang_is_looked_up_where_the_server_will_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "nosuch_server"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('it was imported')")
    assert missing({**ABSENT, "python_path": [str(tmp_path)]}) == []
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # which no server inherits
    assert len(missing(ABSENT)) == 1


def test_nothing_is_asked_for_servers_that_are_not_started_here() -> None:
    assert missing(ABSENT, here=False) == []
    assert missing(ABSENT, tags={"executor": frozenset({"places-processes"})}) == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"max-total-tokens": 1, "max_total_tokens": 8192}, "max_total_tokens twice"),
        ({"load_format": "dummy"}, "no server fits"),
        ({"nnodes": 2, "pp-size": 2}, "nnodes, pp-size"),
    ],
)
def test_server_arguments_that_no_run_can_use_are_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SglangOptions(server_args=args)
