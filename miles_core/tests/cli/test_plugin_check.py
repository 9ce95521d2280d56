"""`miles plugins check` finds each fault of a descriptor, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from click.testing import CliRunner
from pydantic import BaseModel, ConfigDict

from miles_core.capability import Capability, State, conflicts
from miles_core.cli import main
from miles_core.cli.plugin_check import check_entry, check_plugin, rule_fields
from miles_core.registry import Entry, Plugin, discover

HERE = "miles_core_tests_check"


class Sound(BaseModel):
    """Closed and documented."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
    low: float = 0.0
    """Lower."""


class Loose(BaseModel):
    low: float = 0.0


class Reserved(Sound):
    use: str = ""
    """Clashes with the pick's own key."""


def sound(inputs, *, low=0.0):
    return inputs


@pytest.fixture
def targets(monkeypatch):
    """What the entries' `load` and `options` stand for."""
    import sys
    import types

    module = types.ModuleType(HERE)
    module.__dict__.update(Sound=Sound, Loose=Loose, Reserved=Reserved, sound=sound, other=lambda: 0)
    monkeypatch.setitem(sys.modules, HERE, module)


def entry(**changes) -> Entry:
    capability = Capability(name="x", summary="s", load=f"{HERE}:sound", options=f"{HERE}:Sound")
    return Entry(kind="loss", capability=replace(capability, **changes), distribution="d", version="1", plugin="p")


FIELDS = rule_fields(discover().entries())


def test_a_sound_capability_passes(targets):
    rule = conflicts("loss.use=ppo-clip", "loss.low=0.3", "placement.mode=separate", id="r", because="b", instead="i")
    assert check_entry(entry(rules=(rule,)), FIELDS).found == ()


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"load": f"{HERE}:gone"}, "does not exist"),
        ({"load": "no_such_module:x"}, "cannot be imported"),
        ({"load": f"{HERE}:other"}, "cannot be called as (inputs, **options)"),
        ({"options": f"{HERE}:sound"}, "is not a pydantic model"),
        ({"options": f"{HERE}:Loose"}, "`Loose` is not frozen"),
        ({"options": f"{HERE}:Loose"}, "`Loose` accepts unknown options"),
        ({"options": f"{HERE}:Loose"}, "option `low` has no description"),
        ({"options": f"{HERE}:Reserved"}, "option `use` has a name the run-file keeps for itself"),
        ({"provides": frozenset({"records-route"})}, "there is no tag `records-route`"),
        ({"rules": (conflicts("loss.loww=1", id="r", because="b", instead="i"),)}, "a run-file has no `loss.loww`"),
        ({"rules": (conflicts("schedule.steps=x", id="r", because="b", instead="i"),)}, "can never be 'x'"),
        ({"rules": (conflicts("placement.mode=shared", id="r", because="b", instead="i"),)}, "can never be 'shared'"),
        ({"rules": (conflicts("schedule.steps=0", id="r", because="b", instead="i"),)}, "can never be '0'"),
    ],
)
def test_each_fault_is_named(targets, changes, fault):
    result = check_entry(entry(**changes), FIELDS)
    assert result.level == "failure"
    assert any(fault in found for found in result.found), result.found


@pytest.mark.parametrize(
    "path",
    [
        "data",
        "data.train",
        "rollout.sampling.temperature",
        "session.matcher.use",
        "corrections.use",
        "rewards.use",
        "tracking.trackers.use",
        "loss.low",
        "corrections.high",
        "objective.fixed_length_tokens",
        "check_weight_update_equal",
    ],
)
def test_a_rule_may_name_every_part_of_a_run_file(path):
    assert path in FIELDS


def test_possible_literals_follow_the_schema():
    assert FIELDS["objective.fixed_length_tokens"]("null")
    assert FIELDS["check_weight_update_equal"]("true")
    assert not FIELDS["check_weight_update_equal"]("colocated")
    assert not FIELDS["schedule.steps"]("null")
    assert FIELDS["data"]("null")


@pytest.mark.parametrize("state", [State.UNAVAILABLE, State.DISABLED])
def test_a_capability_that_is_not_to_be_loaded_is_a_note(targets, state):
    assert check_entry(replace(entry(), state=state, reason="needs x"), FIELDS).level == "note"


def test_a_conflict_is_a_failure(targets):
    assert check_entry(replace(entry(), state=State.CONFLICT, reason="also", do="d"), FIELDS).level == "failure"


@pytest.mark.parametrize(
    ("state", "load_ms", "level"),
    [
        (State.OK, 5.0, "ok"),
        (State.OK, 101.0, "warning"),
        (State.DISABLED, 0.0, "note"),
        (State.BROKEN, 0.0, "failure"),
        (State.INCOMPATIBLE, 0.0, "failure"),
    ],
)
def test_how_a_plugin_loaded_decides_its_level(state, load_ms, level):
    plugin = Plugin(name="p", module="m", distribution="d", version="1", state=state, load_ms=load_ms, reason="r")
    assert check_plugin(plugin).level == level


def test_the_exit_code_says_whether_anything_failed(monkeypatch):
    monkeypatch.setattr("miles_core.cli.plugin_check.check_entry", lambda entry, fields: OK)
    monkeypatch.setattr("miles_core.cli.plugin_check.check_plugin", lambda plugin: OK)
    assert CliRunner().invoke(main, ["plugins", "check"]).exit_code == 0
    monkeypatch.setattr("miles_core.cli.plugin_check.check_plugin", lambda plugin: replace(OK, level="failure"))
    assert CliRunner().invoke(main, ["plugins", "check"]).exit_code == 1


OK = check_plugin(Plugin(name="p", module="m", distribution="d", version="1", state=State.OK))
