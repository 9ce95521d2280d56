"""Reading a run-file: YAML 1.2 values, lines, overrides."""

from __future__ import annotations

import contextlib
import pickle
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.config import yaml12
from miles_core.config.load import load, parse
from miles_core.config.problems import Problem, RunFileError, render_json, render_text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("-.inf", float("-inf")),
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("No", "No"),
        ("y", "y"),
        ("12:30:00", "12:30:00"),
        ("012", 12),
        ("0o17", 15),
        ("0x1F", 31),
        ("1_000", "1_000"),
        ("2024-01-01", "2024-01-01"),
        ("True", True),
        ("~", None),
        ("null", None),
        ("", None),
        ("'1'", "1"),
        ("<<", "<<"),
        ("=", "="),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    found = parse(f"key: {text}").tree["key"]
    assert (type(found), found) == (type(value), value)


def test_a_repeated_key_is_a_problem_that_names_both_lines() -> None:
    source = parse("loss: a\nrollout:\n  retries: 1\n  retries: 2\n")
    (problem,) = source.problems
    assert (problem.path, problem.line) == ("rollout.retries", 4)
    assert "line 3" in problem.message
    assert source.tree["rollout"] == {"retries": 1}


@pytest.mark.parametrize("text", ["a: !!python/object/apply:os.getcwd []", "a: !custom x", "? [1]\n: 2", "a: !!int x"])
def test_tags_and_keys_that_are_no_text_are_refused(text: str) -> None:
    assert len(parse(text).problems) == 1


def test_a_list_instead_of_a_mapping_is_a_problem() -> None:
    assert "mapping" in parse("- a").problems[0].message


def test_an_alias_is_its_value_and_a_cycle_is_refused() -> None:
    assert parse("a: &x {b: 1}\nc: *x").tree == {"a": {"b": 1}, "c": {"b": 1}}
    with pytest.raises(RunFileError, match="contains it"):
        parse("a: &x [*x]")


def test_expanding_aliases_and_deep_nesting_end_in_an_error() -> None:
    bomb = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9))
    with pytest.raises(RunFileError, match="expand"):
        parse(bomb)
    for depth in (100, 5000):
        with pytest.raises(RunFileError, match="deep"):
            parse("a: " + "[" * depth + "]" * depth)


def test_a_syntax_error_has_its_line() -> None:
    with pytest.raises(RunFileError) as caught:
        parse("a: 1\nb: [1,\nc: 2\n")
    assert caught.value.problems[0].line == 2
    assert caught.value.exit_code == 2


def test_a_missing_or_binary_file_is_a_run_file_error(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match="No such file"):
        load(tmp_path / "absent.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RunFileError, match="cannot be read"):
        load(tmp_path / "binary.yaml")


def test_origins_give_the_line_of_a_key_or_of_the_section_above() -> None:
    source = parse("name: x\nrollout:\n  sampling:\n    top_p: 1\n  filters:\n    - a\n    - use: b\n")
    assert source.origin(("rollout", "sampling", "top_p")).line == 4
    assert source.origin(("rollout", "filters", 1, "use")).line == 7
    assert source.origin(("rollout", "sampling", "absent")).line == 3
    assert source.origin(("absent",)).line is None


TOML = """name = "x"
model = "m"
[schedule]
steps = 3

[[rewards]]
use = "math"

[[rewards]]
use = "length"
weight = 0.5
"""


def test_toml_gives_the_same_tree_with_lines(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(TOML)
    source = load(tmp_path / "run.toml", ["schedule.steps=9"])
    assert source.tree == {
        "name": "x",
        "model": "m",
        "schedule": {"steps": 9},
        "rewards": [{"use": "math"}, {"use": "length", "weight": 0.5}],
    }
    assert source.origin(("rewards", 1, "weight")).line == 11
    assert source.origin(("schedule", "steps")).source == "--set #1"
    (tmp_path / "bad.toml").write_text("a = 1\nb = \n")
    with pytest.raises(RunFileError) as caught:
        load(tmp_path / "bad.toml")
    assert caught.value.problems[0].line == 2


FILE = """loss: {use: ppo-clip, low: 0.2}
transport: {use: broadcast, bucket_mib: 64}
advantage: grpo
rewards: [math, {use: length, weight: 0.5}]
"""


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("optimizer.lr=1e-6", ("optimizer", "lr"), 1e-6),
        ("loss.low=0.1", ("loss",), {"use": "ppo-clip", "low": 0.1}),
        ("transport=p2p", ("transport",), "p2p"),
        ("advantage.std=false", ("advantage",), {"use": "grpo", "std": False}),
        ("engine.slots=4", ("engine",), {"use": "local", "slots": 4}),
        ("rewards.0=exact", ("rewards", 0), "exact"),
        ("rewards.0.weight=2", ("rewards", 0), {"use": "math", "weight": 2}),
        ("rewards.2=new", ("rewards", 2), "new"),
        ("rollout.filters.0=nonzero-std", ("rollout", "filters"), ["nonzero-std"]),
        ("rollout.sampling={top_p: 0.9}", ("rollout", "sampling"), {"top_p": 0.9}),
        ("name=a=b", ("name",), "a=b"),
        ("data=", ("data",), None),
        ("model.context_length=4", ("model",), {"context_length": 4}),
    ],
)
def test_an_override_sets_its_place(override: str, path: tuple[str | int, ...], value: object) -> None:
    source = parse(FILE, [override])
    assert source.problems == ()
    found: object = source.tree
    for part in path:
        found = found[part]  # type: ignore[index]
    assert found == value
    assert source.origin(path).source == "--set #1" or value == found


def test_an_override_of_a_pick_leaves_no_old_option_and_no_old_line() -> None:
    source = parse(FILE, ["optimizer.lr=1", "transport=p2p"])
    assert source.tree["transport"] == "p2p"
    assert source.origin(("transport", "bucket_mib")) == source.origin(("transport",))
    assert source.origin(("transport",)).source == "--set #2"
    assert source.origin(("loss", "low")).line == 1


@pytest.mark.parametrize("bad", ["zz", "=1", "a..b=1", ".a=1", "a=[", "a={x: 1, x: 2}", "rewards.9=x", "loss.use.x=1"])
def test_a_malformed_override_is_a_problem_and_changes_nothing(bad: str) -> None:
    source = parse(FILE, ["seed=1", bad])
    (problem,) = source.problems
    assert problem.source == "--set #2"
    assert source.tree == {**parse(FILE).tree, "seed": 1}


def test_the_source_is_kept_as_given_with_its_overrides() -> None:
    text = parse("name: x # note\n", ["seed=1"]).as_given()
    assert text.startswith("name: x # note\n")
    assert "--set seed=1" in text


def test_disabled_plugins_are_read_from_any_tree() -> None:
    assert parse("plugins: {disable: [a, b]}").disabled_plugins() == ("a", "b")
    assert parse("plugins: 3").disabled_plugins() == ()


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12)


@settings(max_examples=100, deadline=None)
@given(VALUES)
def test_what_is_dumped_is_read_back(value: object) -> None:
    document = yaml12.parse(yaml12.dump(value))
    assert document.refused == []
    assert repr(document.value) == repr(value)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=st.sampled_from("ab:[]{}&*!|>'\"#%@`,?- \n\t0.e<~\\"), max_size=40))
def test_any_text_is_a_source_or_a_run_file_error(text: str) -> None:
    with contextlib.suppress(RunFileError):  # any other exception fails the test
        assert isinstance(parse(text, [text]).tree, dict)


PROBLEMS = (
    Problem(
        path="placement.mode",
        value="colocated",
        message="a ring needs engines in processes of their own",
        source="run.yaml",
        line=7,
        rule="ring-separate",
        owner="miles-ring 0.1.0",
        do="transport: inprocess, or placement.mode: separate",
    ),
    Problem(
        path="schedule.max_stalness",
        message="unknown key. Did you mean `max_staleness`?",
        source="run.yaml",
        line=12,
    ),
    Problem(path="loss.low", value="0.9", message="must be below `loss.high` (0.28)", source="--set #1"),
)

TEXT = """\
run.yaml:7   placement.mode: colocated  [ring-separate, miles-ring 0.1.0]
             a ring needs engines in processes of their own.   Do: transport: inprocess, or placement.mode: separate
run.yaml:12  schedule.max_stalness      unknown key. Did you mean `max_staleness`?
--set #1     loss.low = 0.9             must be below `loss.high` (0.28).
3 problems; nothing was started."""


def test_the_report_puts_the_file_first_and_counts() -> None:
    error = RunFileError([PROBLEMS[2], *PROBLEMS[:2], PROBLEMS[0]])
    assert str(error) == f"the run-file does not describe a run\n{TEXT}"
    assert error.problems == PROBLEMS


def test_the_report_survives_pickling_and_exists_as_json() -> None:
    error = pickle.loads(pickle.dumps(RunFileError(PROBLEMS)))
    assert (render_text(error.problems), error.problems, error.exit_code) == (TEXT, PROBLEMS, 2)
    assert '"rule": "ring-separate"' in render_json(PROBLEMS)
    assert '"ok": true' in render_json(())
    assert render_text(()) == "no problems."


@pytest.mark.parametrize(
    "text", ["on", "n", "2024-01-01", "12:30:00", "1_000", "0b1", "=", "<<", "1e3", "null", "''", "a\x85b"]
)
def test_texts_are_quoted_where_any_yaml_would_read_them_otherwise(text: str) -> None:
    assert yaml.safe_load(yaml12.dump({"key": text})) == {"key": text}
    assert yaml12.parse(yaml12.dump({"key": text})).value == {"key": text}
