from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from miles_core.cli import main
from miles_core.testing.tiny import CHAT_TEMPLATE, write_tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_tokenizer(tmp_path)
    return tmp_path


def check(folder: Path, *more: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["tito", "check", "--family", "default", "--tokenizer", str(folder), *more])
    return done.exit_code, done.output


def test_a_family_that_holds_is_shown_and_exits_with_0(folder: Path) -> None:
    code, text = check(folder)
    assert code == 0, text
    assert [line.split()[:2] for line in text.splitlines()[1:3]] == [["ok", "append-only"], ["ok", "equals"]]
    assert "image input is refused" in text


def test_a_property_that_fails_exits_with_1_and_says_where(folder: Path) -> None:
    template = folder / "hides.jinja"
    template.write_text(CHAT_TEMPLATE.replace("message['content']", "message['content'] | replace('3 + 3', '')"))
    code, text = check(folder, "--template", str(template))
    assert code == 1
    assert "FAILED: nothing vanishes: users in turn (default): 'And 3 + 3?' is not in the row" in text


def test_findings_come_as_json(folder: Path) -> None:
    code, text = check(folder, "--json")
    found = json.loads(text)
    assert code == 0
    assert {"mode", "property", "scenario", "verdict", "detail"} == set(found[0])
    assert {each["verdict"] for each in found} <= {"ok", "refused"}


def test_an_unknown_family_is_named_with_those_there_are(folder: Path) -> None:
    done = CliRunner().invoke(main, ["tito", "check", "--family", "nope", "--tokenizer", str(folder)])
    assert done.exit_code == 2
    assert "no usable token family is called 'nope'" in done.output
