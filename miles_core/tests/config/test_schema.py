"""The JSON schema accepts what `resolve` accepts, value by value, and is a valid schema itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator

from miles_core.config.load import parse
from miles_core.config.resolve import check_run, resolve
from miles_core.config.schema import run_file_schema
from miles_core.config.spec import dump
from miles_core.registry import Registry

BASE = """\
name: run
model: model
data: train.jsonl
rewards: [score.py:score]
schedule: {steps: 3}
"""


@pytest.fixture(scope="module")
def validator(registry: Registry) -> Any:
    schema = run_file_schema(registry)
    Draft7Validator.check_schema(schema)
    return Draft7Validator(schema)


GOOD = [
    [],
    ["loss=gspo", "advantage={use: grpo, std: false}"],
    ["transport={use: ring, low: 0.5}", "placement.mode=separate"],
    ["rewards=[score.py:score, {use: score.py:score, weight: 0.5}, {use: http, url: 'http://x', weight: 2}]"],
    ["rollout.filters=[nonzero-std, {use: no-failures}]", "tracking.trackers=[]"],
    ["session.family=null", "session.matcher=strict"],
    ["model={path: model, context_length: 400}", "data={train: train.jsonl, system: Be brief.}"],
    ["optimizer={betas: [0.9, 0.99], clip_grad_norm: null}"],
    ["environment=gym", "data=null"],
]
BAD = [
    ["loss=pppo"],
    ["loss={use: ppo-clip, hihg: 0.3}"],
    ["loss={low: 0.3}"],
    ["loss={use: gspo, low: 3}"],
    ["engine=sglang"],
    ["engine=score.py:score"],
    ["rewards=[http]"],
    ["rewards=[{use: score.py:score, wieght: 1}]"],
    ["rewards=score.py:score"],
    ["transport={use: inprocess, low: 0.5}"],
    ["schedule.steps=0"],
    ["schedule.mode=async"],
    ["rollout.sampling.temperature=hot"],
    ["optimizer.betas=[0.9]"],
    ["optimizer.betas=[0.9, 0.99, 0.5]"],
    ["name=a/b"],
    ["seed=true"],
    ["lr=1"],
]


@pytest.mark.parametrize("overrides", GOOD)
def test_a_good_file_fits(workplace: Path, registry: Registry, validator: Any, overrides: list[str]) -> None:
    source = parse(BASE, overrides)
    assert check_run(source, registry)[1] == []
    assert [error.message for error in validator.iter_errors(source.tree)] == []


@pytest.mark.parametrize("overrides", BAD)
def test_a_bad_file_does_not_fit(workplace: Path, registry: Registry, validator: Any, overrides: list[str]) -> None:
    source = parse(BASE, overrides)
    assert check_run(source, registry)[1]
    assert list(validator.iter_errors(source.tree))


def test_the_fully_written_file_fits(workplace: Path, registry: Registry, validator: Any) -> None:
    text = dump(resolve(parse(BASE, ["corrections=[tis]"]), registry).spec)
    assert [error.message for error in validator.iter_errors(parse(text).tree)] == []


def test_every_key_has_a_description_for_the_editor(registry: Registry) -> None:
    schema = run_file_schema(registry)
    bare = [name for name, entry in schema["properties"].items() if not entry.get("description")]
    assert bare == []
