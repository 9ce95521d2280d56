"""What only opening a part tells: rows that are no prompts, and families that cannot write for the tokenizer."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from miles_core.capability import Capability
from miles_core.config.load import parse
from miles_core.config.resolve import check_run
from miles_core.driver.first_look import ROWS, first_look
from miles_core.registry import Entry, Registry
from miles_core.testing.tiny import write_tiny_tokenizer

from .runs import BASE

FAMILY = """
from miles_core.errors import DataError

class Picky:
    claims = classmethod(lambda cls, tokenizer: False)

    def __init__(self, options, tokenizer):
        if tokenizer.token_id("<|never|>") is None:
            raise DataError("a control token is missing", expected="<|never|>", do="pick another session.family")

class Broken(Picky):
    def __init__(self, options, tokenizer):
        raise IndexError("tuple index out of range")

class Easy(Picky):
    def __init__(self, options, tokenizer): ...
"""


@pytest.fixture
def installed(workplace: Path, registry: Registry) -> Registry:
    """With three more families; the model's tokenizer can be read."""
    write_tiny_tokenizer(workplace / "model")
    (workplace / "families.py").write_text(FAMILY)
    more = [
        Entry(
            kind="tito_family",
            capability=Capability(name=name.lower(), summary="", load=f"{workplace}/families.py:{name}"),
            distribution="miles-stand-in",
            version="0.1.0",
            plugin="stand-in",
        )
        for name in ("Picky", "Broken", "Easy")
    ]
    return replace(registry, capabilities=(*registry.capabilities, *more))


def found(
    registry: Registry, *overrides: str, warned: list[str] | None = None
) -> Sequence[tuple[str | None, str, str]]:
    look = functools.partial(first_look, registry=registry, warn=[].append if warned is None else warned.append)
    run, problems = check_run(parse(BASE, overrides), registry, look=look)
    assert (run is None) == bool(problems)
    return [(problem.rule, problem.path, problem.message) for problem in problems]


def write_rows(file: Path, *rows: object) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


GOOD = {"prompt": "1 + 1", "label": "2"}


def test_a_sound_run_passes_and_is_told_what_its_start_would_tell(installed: Registry) -> None:
    warned: list[str] = []
    assert found(installed, warned=warned) == []
    assert ["no installed token family claims" in text for text in warned] == [True], warned
    warned.clear()
    assert found(installed, "session.family=easy", warned=warned) == []
    assert ["easy, which does not claim" in text for text in warned] == [True], warned


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("picky", "a control token is missing; expected <|never|>"),
        ("broken", "IndexError: tuple index out of range"),
    ],
)
def test_a_family_that_cannot_write_for_the_tokenizer_is_refused(
    installed: Registry, family: str, message: str
) -> None:
    assert found(installed, f"session.family={family}") == [("MIL707", "session.family", message)]


def test_a_tokenizer_that_cannot_be_read_is_the_models_fault(installed: Registry, workplace: Path) -> None:
    (workplace / "model" / "tokenizer.json").write_text('{"a":')
    ((rule, path, _),) = found(installed, "session.family=picky")
    assert (rule, path) == ("MIL702", "model.path")


def test_a_column_that_no_row_has_is_named_with_those_there_are(installed: Registry, workplace: Path) -> None:
    ((rule, path, message),) = found(installed, "data.prompt_field=question")
    assert (rule, path) == ("MIL706", "data.train")
    assert "1 of 1 rows cannot be used" in message
    assert "column 'question' is missing; there are prompt" in message
    write_rows(workplace / "train.jsonl", GOOD)
    ((_, _, message),) = found(installed, "data.label_field=solution")
    assert message == "no row has the column 'solution'; label, prompt"


def test_held_out_rows_are_read_where_they_are_evaluated(installed: Registry, workplace: Path) -> None:
    (workplace / "heldout.jsonl").write_text("[1]\n")
    assert found(installed, "data.eval=heldout.jsonl") == []
    ((_, path, message),) = found(installed, "data.eval=heldout.jsonl", "eval.every_steps=1")
    assert path == "data.eval"
    assert "expected a JSON object, found list" in message


def test_only_what_is_certain_is_said_of_rows_that_were_not_read(installed: Registry, workplace: Path) -> None:
    later = {**GOOD, "solution": "2"}
    write_rows(workplace / "train.jsonl", *[GOOD] * ROWS, later)
    assert found(installed, "data.label_field=solution") == []
    write_rows(workplace / "train.jsonl", *[{"question": "1 + 1"}] * ROWS, GOOD)
    assert found(installed, "data.bad_rows=skip") == []
    ((_, _, message),) = found(installed)
    assert f"{ROWS} of the first {ROWS} rows" in message


def test_one_look_adds_to_the_problems_between_keys(installed: Registry) -> None:
    rules = [rule for rule, _, _ in found(installed, "data.prompt_field=question", "schedule.minibatches=9")]
    assert sorted(map(str, rules)) == ["MIL201", "MIL706"]
    assert [path for _, path, _ in found(installed, "data.prompt_field=question", "loss.low=2")] == ["loss.low"]
