from __future__ import annotations

import json
import os
import subprocess
import sys
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


THINKS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and m.reasoning_content and loop.last %}"
    "{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def new(folder: Path, template: str, target: Path) -> tuple[int, str]:
    (folder / "chat_template.jinja").write_text(template)
    command = ["tito", "new", "mine", "--tokenizer", str(folder), "--output", str(target)]
    done = CliRunner().invoke(main, command)
    return done.exit_code, done.output


def test_a_family_is_written_whose_tests_pass(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "miles-tito-mine"
    code, text = new(folder, THINKS, target)
    assert code == 0, text
    assert "the template drops reasoning once a user speaks again; the family keeps it" in text
    written = (target / "src" / "miles_tito_mine" / "family.py").read_text()
    assert "end = '<|im_end|>'" in written
    assert "seam = '\\n'" in written
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(target / "tests")],
        capture_output=True,
        text=True,
        check=False,
        cwd=target,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(target / "src"), *sys.path])},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " failed" not in done.stdout
    assert " passed" in done.stdout


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (THINKS.replace("m.content", "m.content[:3]"), "a message is not shown exactly once"),
        (THINKS.replace("'<|im_start|>assistant", "'<|im_start|>model"), "not how an assistant's turn begins"),
        ("{{ messages | length }}" + THINKS, "the first user's turn, when a conversation goes on, changes"),
        (
            THINKS.replace("{{ m.c", "{{ ('say: ' if m.role == 'assistant' else '') + m.c"),
            "round trip: one turn: sampled",
        ),
    ],
)
def test_a_template_that_cannot_be_derived_says_what_it_lacks(
    template: str, words: str, folder: Path, tmp_path: Path
) -> None:
    target = tmp_path / "miles-tito-mine"
    code, text = new(folder, template, target)
    assert code == 1, text
    assert words in text
    assert "found:" in text
    assert not target.exists()
