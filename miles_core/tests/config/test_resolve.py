"""Validation: everything wrong is found at once, with its place and remedy; what is right becomes a typed run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miles_core.capability import KINDS, Capability, Rule
from miles_core.config import translate, yaml12
from miles_core.config.load import parse
from miles_core.config.picks import SECTIONS
from miles_core.config.problems import Problem, RunFileError, render_json, render_text
from miles_core.config.resolve import ResolvedRun, check_run, resolve
from miles_core.config.spec import RunSpec, dump
from miles_core.registry import Entry, Registry

from .runs import BASE, only, problems


def test_a_sound_run_resolves_with_every_default(workplace: Path, registry: Registry) -> None:
    run = resolve(parse(BASE, ["corrections=[tis]", "loss.low=0.1"]), registry)
    assert isinstance(run, ResolvedRun)
    assert set(run.one) == {kind for kind, section in SECTIONS.items() if not KINDS[kind].many} - {"tito_family"}
    assert run.one["loss"].options.low == 0.1
    assert run.one["loss"].owner.startswith("miles-core ")
    assert run.many["correction"][0].options.high == 2.0
    assert run.many["reward"][0].capability.load == f"{workplace}/score.py:score"
    assert run.many["filter"] == ()
    assert run.spec.model.path == str(workplace / "model")
    assert run.spec.data is not None
    assert run.spec.data.train == str(workplace / "train.jsonl")
    assert run.spec.loss.options == {"low": 0.1, "high": None, "dual_clip": None}


def test_the_resolved_file_loads_to_the_same_run(workplace: Path, registry: Registry) -> None:
    run = resolve(parse(BASE, ["corrections=[tis]", "session.family=default"]), registry)
    text = dump(run.spec)
    assert "clip_grad_norm: 1.0" in text
    assert "context_length: null" in text
    assert "dual_clip: null" in text
    again = resolve(parse(text), registry)
    assert again.spec == run.spec
    assert again == run


def test_the_default_tracker_is_tensorboard_where_it_is_installed(workplace: Path, registry: Registry) -> None:
    run = resolve(parse(BASE), registry)
    usable = [e.name for e in registry.entries("tracker") if e.state == "ok" and e.name == "tensorboard"]
    assert [tracker.capability.name for tracker in run.many["tracker"]] == usable
    assert resolve(parse(BASE, ["tracking.trackers=[]"]), registry).many["tracker"] == ()


def test_all_problems_come_at_once_in_file_order(workplace: Path, registry: Registry) -> None:
    text = """\
name: run
model: absent
data: train.jsonl
engine: sglang
loss: {use: ppo-clip, hihg: 0.3, low: 2}
transport: {use: ring, low: 0.1}
rewards: [score.py:score]
schedule: {steps: 0, max_stalness: 3}
lr: 1e-6
"""
    with pytest.raises(RunFileError) as caught:
        resolve(parse(text, ["advantage=grop", "optimizer.lr=fast"]), registry)
    found = [(p.line, p.source, p.path, p.rule) for p in caught.value.problems]
    assert found == [
        (2, "run-file", "model.path", "MIL701"),
        (4, "run-file", "engine", None),
        (5, "run-file", "loss.low", None),
        (5, "run-file", "loss.hihg", None),
        (6, "run-file", "placement.mode", "ring-separate"),
        (8, "run-file", "schedule.steps", None),
        (8, "run-file", "schedule.max_stalness", None),
        (9, "run-file", "lr", None),
        (None, "--set #1", "advantage", None),
        (None, "--set #2", "optimizer.lr", None),
    ]
    text = str(caught.value)
    assert "Did you mean `high`?" in text
    assert "Did you mean `optimizer.lr`?" in text
    assert "pip install 'miles-sglang[engine]'" in text
    assert "did you mean `grpo`?" in text
    assert text.endswith("10 problems; nothing was started.")


def test_a_rule_is_reported_with_id_owner_reason_and_remedy(workplace: Path, registry: Registry) -> None:
    problem = only(registry, "transport=ring", text=BASE + "placement:\n  mode: colocated\n")
    assert problem == Problem(
        path="placement.mode",
        value="colocated",
        message="a ring needs engines in processes of their own",
        source="run-file",
        line=8,
        rule="ring-separate",
        owner="miles-stand-in 0.1.0",
        do="transport: inprocess, or placement.mode: separate",
    )


def test_what_an_override_sets_as_a_whole_is_no_default(workplace: Path, registry: Registry) -> None:
    problem = only(registry, "transport=ring", "placement={mode: colocated}")
    assert (problem.path, problem.value, problem.source) == ("placement.mode", "colocated", "--set #2")
    problem = only(registry, "transport=ring")
    assert (problem.value, problem.source) == ("colocated (default)", "--set #1")


def test_a_rule_that_reads_a_broken_key_stays_silent(workplace: Path, registry: Registry) -> None:
    problem = only(registry, "transport=ring", "placement.mode=sideways")
    assert (problem.path, problem.rule) == ("placement.mode", None)
    problem = only(registry, "advantage=gae", "backend=none-such")  # gae needs a critic, of an unknown backend
    assert problem.path == "backend"


def test_options_are_checked_without_guessing(workplace: Path, registry: Registry) -> None:
    assert only(registry, "loss.low='0.1'").message == "must be a number"
    assert only(registry, "loss.low=true").message == "must be a number"
    assert only(registry, "schedule.steps='3'").message == "must be an integer"
    assert only(registry, "schedule.steps=2.0").message == "must be an integer"
    assert only(registry, "optimizer.lr=.inf").path == "optimizer.lr"
    assert only(registry, "corrections=[{use: tis, high: .inf}]").path == "corrections.0.high"
    assert only(registry, "corrections=[{use: tis, low: 3}]").message == "low (3) must be below high (2)"
    assert "takes no options" in only(registry, "environment={use: chat, x: 1}").message


def test_a_wrong_pick_never_hides_the_others(workplace: Path, registry: Registry) -> None:
    found = problems(registry, "rollout.filters=[3, {low: 1}, nonzero-std, {use: no-failures, a: 1}, nozero-std]")
    assert [p.path for p in found] == [
        "rollout.filters.0",
        "rollout.filters.1.use",
        "rollout.filters.3.a",
        "rollout.filters.4",
    ]


def test_a_function_is_refused_where_a_class_is_needed_and_its_file_must_exist(
    workplace: Path, registry: Registry
) -> None:
    assert "does not exist" in only(registry, "rewards=[absent.py:score]").message
    assert only(registry, "engine=score.py:score").path == "engine"


def test_a_missing_required_key_is_named_with_its_meaning(registry: Registry) -> None:
    found = {p.path: p for p in problems(registry, text="{}")}
    assert {"name", "model", "schedule"} <= set(found)
    assert found["name"].message.startswith("is missing (Name of the run directory")
    assert found["name"].line is None


@pytest.mark.parametrize(
    "text",
    ["", "3", "[]", "name: [1, {a: b}]", "model: {path: {}}", "rewards: {}", "loss: {use: {}}", 'name: "\\ud800"'],
)
def test_validation_is_total_on_nonsense(registry: Registry, text: str) -> None:
    run, found = check_run(parse(text), registry)
    assert run is None
    assert found


# --- code that is not ours --------------------------------------------------------------------------------------------

PLUGIN = """
from miles_core.rules import Finding
from pydantic import BaseModel, model_validator

class Careless(BaseModel):
    size: int = 3

    @model_validator(mode="after")
    def _check(self):
        return {}["no such key"] if self.size > 9 else self

def even(facts):
    if facts.values["transport.size"] % 2:
        yield Finding(path="transport.size", found=f"{facts.values['transport.size']} is odd")

def raises(facts):
    raise RuntimeError("a bug")
"""


def with_transport(registry: Registry, **parts: Any) -> Registry:
    entry = Entry(
        kind="transport",
        capability=Capability(name="odd", summary="", load="x:X", **parts),
        distribution="miles-odd",
        version="2.0",
        plugin="odd",
    )
    return replace(registry, capabilities=(*registry.capabilities, entry))


@pytest.fixture
def odd_plugin(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (workplace / "odd_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(workplace))
    yield
    sys.modules.pop("odd_plugin", None)


@pytest.mark.usefixtures("odd_plugin")
def test_a_rules_check_sees_the_options_and_reports_under_its_id(registry: Registry) -> None:
    rule = Rule(id="even-size", because="halves must be equal", instead="use an even size", check="odd_plugin:even")
    odd = with_transport(registry, options="odd_plugin:Careless", rules=(rule,))
    assert problems(odd, "transport={use: odd, size: 4}") == []
    problem = only(odd, "transport={use: odd, size: 5}")
    assert (problem.path, problem.rule, problem.owner) == ("transport.size", "even-size", "miles-odd 2.0")
    assert problem.message == "5 is odd; halves must be equal"


@pytest.mark.usefixtures("odd_plugin")
def test_a_plugin_that_raises_is_a_problem_with_its_name(registry: Registry) -> None:
    rule = Rule(id="buggy", because="x", instead="y", check="odd_plugin:raises")
    problem = only(with_transport(registry, rules=(rule,)), "transport=odd")
    assert "RuntimeError: a bug" in problem.message
    assert (problem.rule, problem.owner) == ("buggy", "miles-odd 2.0")
    problem = only(with_transport(registry, options="odd_plugin:Careless"), "transport={use: odd, size: 10}")
    assert "KeyError" in problem.message
    assert problem.owner == "miles-odd 2.0"
    assert "odd_plugin" in only(with_transport(registry, options="odd_plugin:Gone"), "transport=odd").message


# --- totality ---------------------------------------------------------------------------------------------------------

KEYS = sorted({part for path in translate.known_paths(RunSpec) for part in path.split(".")} | {"low", "std", "x"})
WORDS = ["ppo-clip", "grpo", "tis", "ring", "inprocess", "spread", "gym", "score.py:score", "http", "sync", "loss", "?"]
ATOMS = st.none() | st.booleans() | st.integers(-2, 10) | st.floats() | st.sampled_from(WORDS) | st.text(max_size=3)
TREES = st.recursive(
    ATOMS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=10,
)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    sections=st.dictionaries(st.sampled_from([*RunSpec.model_fields, "x"]), TREES, max_size=5),
    path=st.sampled_from([*translate.known_paths(RunSpec)]),
    value=TREES,
)
def test_validation_never_raises(workplace: Path, registry: Registry, sections: Any, path: str, value: Any) -> None:
    """Whatever a file says: a run, or at least one problem."""
    base = parse(BASE, [f"{path}={yaml12.dump(value)}"])
    for source in (base, replace(base, tree={**base.tree, **sections})):
        run, found = check_run(source, registry)
        assert (run is None) == bool(found)
        render_text(found)
        render_json(found)
