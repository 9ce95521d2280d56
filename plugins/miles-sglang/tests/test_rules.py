"""Options that nothing would read, or that no server could do, are refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from miles_core.config.resolve import facts_of
from miles_core.registry import load_target
from miles_core.rules import evaluate
from miles_sglang.options import SglangOptions
from miles_sglang.plugin import miles_engines

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
    return [violation.rule.id for violation in evaluate(rules, facts_of(sections, {}), load_target)]


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
