"""Rules: what fires, what a person is told, and which rules can never fire."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.errors import PluginError
from miles_core.plugin import Facts, Finding, Rule, conflicts, requires
from miles_core.rules import evaluate, lint, parse

FACTS = Facts(
    {
        "placement.mode": "colocated",
        "placement.trainer_ranks": 2,
        "objective.kl_coef": 0.5,
        "check_weight_update_equal": True,
        "data": None,
        "name": "1",
        "corrections.use": ("tis", "metrics-only"),
    },
    {"engine": frozenset({"records-routes"}), "backend": frozenset()},
)


def fired(rule: Rule, facts: Facts = FACTS) -> list[tuple[tuple[str, ...], str]]:
    return [(each.paths, each.found) for each in evaluate([(rule, "x 1.0")], facts, no_check)]


def no_check(target: str) -> object:
    raise AssertionError("no check is loaded here")


def conflict(*when: str) -> Rule:
    return conflicts(*when, id="r", because="b", instead="i")


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("placement.mode=colocated", True),
        ("placement.mode = separate", False),
        ("placement.mode in (separate, colocated)", True),
        ("placement.mode in (separate, other)", False),
        ("placement.trainer_ranks=2", True),
        ("placement.trainer_ranks=2.0", True),
        ("placement.trainer_ranks=two", False),
        ("placement.trainer_ranks=true", False),
        ("objective.kl_coef=0.5", True),
        ("check_weight_update_equal=true", True),
        ("check_weight_update_equal=1", False),
        ("check_weight_update_equal=True", False),
        ("data=null", True),
        ("name=1", True),
        ("corrections.use=tis", True),
        ("corrections.use=gae", False),
        ("absent.path=null", False),
        ("engine:records-routes", True),
        ("backend:records-routes", False),
        ("transport:records-routes", False),
    ],
)
def test_a_condition_holds_exactly_when_the_facts_say_so(condition: str, holds: bool):
    assert parse(condition).holds(FACTS) is holds


@pytest.mark.parametrize("text", ["", "a", "a=", "=b", "a b=c", "a in ()", "a in b", "kind:", "Kind:tag", "a..b=c"])
def test_what_is_no_condition_is_refused(text: str):
    with pytest.raises(PluginError, match="cannot be read"):
        parse(text)


def test_a_conflict_fires_only_when_all_conditions_hold():
    assert fired(conflict("placement.mode=colocated", "data=null")) == [
        (("placement.mode", "data"), "placement.mode: colocated, data: null")
    ]
    assert fired(conflict("placement.mode=colocated", "data=x")) == []


def test_a_requirement_fires_for_the_unmet_need_and_points_there_first():
    rule = requires(
        "placement.mode=colocated", engine="records-routes", backend="replays-routes", id="r", because="b", instead="i"
    )
    assert fired(rule) == [
        (("backend", "placement.mode"), "backend does not provide `replays-routes`, placement.mode: colocated")
    ]
    met = Facts(FACTS.values, {**FACTS.tags, "backend": frozenset({"replays-routes"})})
    assert fired(rule, met) == []
    assert fired(rule, Facts({"placement.mode": "separate"})) == []


def test_a_need_may_be_a_value():
    rule = Rule(id="r", needs=("placement.trainer_ranks=1",), because="b", instead="i")
    assert fired(rule) == [(("placement.trainer_ranks",), "placement.trainer_ranks: 2")]
    assert fired(rule, Facts({"placement.trainer_ranks": 1})) == []


def test_a_tag_points_at_the_section_where_its_kind_is_picked():
    assert fired(conflict("engine:records-routes"))[0][0] == ("engine",)
    assert parse("tito_family:streams").path == "session.family"


def test_a_check_reports_each_finding_and_runs_only_when_its_conditions_hold():
    def divisible(facts: Facts) -> list[Finding]:
        return [Finding(path="placement.trainer_ranks", found=f"{facts.values['placement.trainer_ranks']} and 3")]

    rule = Rule(id="r", when=("placement.mode=colocated",), check="m:f", because="b", instead="i")
    (violation,) = evaluate([(rule, "x 1.0")], FACTS, {"m:f": divisible}.__getitem__)
    assert (violation.paths, violation.found, violation.owner) == (("placement.trainer_ranks",), "2 and 3", "x 1.0")
    assert evaluate([(replace(rule, when=("data=x",)), "x")], FACTS, no_check) == []


@given(st.lists(st.booleans(), max_size=4), st.lists(st.booleans(), max_size=4))
def test_a_rule_fires_exactly_as_its_definition_says(when: list[bool], needs: list[bool]):
    facts = Facts({f"w.f{i}": value for i, value in enumerate(when)} | {f"n.f{i}": v for i, v in enumerate(needs)})
    rule = Rule(
        id="r",
        when=tuple(f"w.f{i}=true" for i in range(len(when))),
        needs=tuple(f"n.f{i}=true" for i in range(len(needs))),
        because="b",
        instead="i",
    )
    assert bool(fired(rule, facts)) is (all(when) and (not needs or not all(needs)))


FIELDS = {"placement.mode": {"colocated", "separate"}.__contains__, "placement.trainer_ranks": str.isdigit}


@pytest.mark.parametrize(
    ("rule", "fault"),
    [
        (conflict("placement.mod=colocated"), "a run-file has no `placement.mod`"),
        (conflict("placement.mode=colocate"), "`placement.mode` can never be 'colocate'"),
        (conflict("placement.mode in (separate, x)"), "`placement.mode` can never be 'x'"),
        (conflict("engine:records-route"), "there is no tag `records-route`"),
        (conflict("engines:records-routes"), "there is no kind `engines`"),
        (conflict("placement.mode colocated"), "is neither"),
        (conflict(), "would always fire"),
        (replace(conflict("placement.mode=separate"), id="Bad Id"), "not kebab-case"),
        (replace(conflict("placement.mode=separate"), because=" "), "must say"),
        (Rule(id="r", needs=("placement.mode=separate",), check="m:f", because="b", instead="i"), "use one"),
    ],
)
def test_a_rule_that_cannot_do_its_work_is_a_lint_fault(rule: Rule, fault: str):
    (found,) = lint(rule, FIELDS)
    assert fault in found


def test_a_sound_rule_has_no_fault():
    rule = requires("placement.mode in (separate, colocated)", engine="streams", id="r-1", because="b", instead="i")
    assert lint(rule, FIELDS) == []
