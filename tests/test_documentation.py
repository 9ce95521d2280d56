"""The pages that people write by hand: every one can be found, every link leads somewhere, every run-file is valid."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from miles_core.cli import main
from miles_core.config.load import parse
from miles_core.config.resolve import check_run
from miles_core.config.spec import RunSpec
from miles_core.config.yaml12 import YamlError
from miles_core.config.yaml12 import parse as parse_yaml
from miles_core.registry import Registry, discover

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for pattern in ("README.md", "docs/**/*.md", "[!.]*/README.md", "plugins/*/README.md")
    for path in ROOT.glob(pattern)
)
LEFT_TO_THE_READER = {
    "name": "anything",
    "model": "models/any",
    "data": "train.jsonl",
    "rewards": "[reward.py:score]",
    "schedule": "{steps: 10}",
}
"""What a fragment of a run-file leaves out."""


def links(page: Path) -> set[Path]:
    targets = re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    return {(page.parent / target).resolve() for target in targets if "://" not in target}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert not [str(target) for target in links(page) if not target.exists()]


def test_every_page_can_be_reached_from_the_readme() -> None:
    found, todo = set[Path](), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page not in found:
            found.add(page)
            todo += [target for target in links(page) if target.suffix == ".md"]
    assert not [str(page.relative_to(ROOT)) for page in PAGES if page not in found]


def commands(command: click.Command, *words: str) -> Iterator[str]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from commands(found, *words, name)
    else:
        yield " ".join(words)


def test_the_page_of_commands_has_every_command_and_no_other() -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^### (.*)$", page, re.MULTILINE)) == sorted(commands(main))


def run_files() -> Iterator[Any]:
    """Every block of a page that is (part of) a run-file."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        indented = re.findall(r"(?:^(?: {4}.*|)\n)+", text, re.MULTILINE)
        for number, block in enumerate([*indented, *re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]):
            try:
                document = parse_yaml(textwrap.dedent(block))
            except YamlError:
                continue  # commands or Python
            tree, alternatives = document.value, document.refused  # a section twice: one or the other
            if isinstance(tree, dict) and tree and tree.keys() <= RunSpec.model_fields.keys() and not alternatives:
                yield pytest.param(textwrap.dedent(block), tree, id=f"{page.relative_to(ROOT)}-{number}")


@pytest.fixture(scope="module")
def registry() -> Registry:
    return discover()


@pytest.mark.parametrize(("text", "tree"), list(run_files()))
def test_run_files_are_valid(
    text: str, tree: dict[str, Any], registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = {key: value for key, value in LEFT_TO_THE_READER.items() if key not in tree}
    if "reasoning-gym" in text:
        rest.pop("data", None)  # it brings its own prompts
    text = "\n".join([text, *(f"{key}: {value}" for key, value in rest.items())])
    for file, function in re.findall(r"(\w+\.py):(\w+)", text):
        with (tmp_path / file).open("a") as opened:
            opened.write(f"def {function}(*_): ...\n")
    monkeypatch.chdir(tmp_path)
    _, problems = check_run(parse(text), registry, files=False)
    assert [str(problem) for problem in problems if "cannot be used: needs" not in problem.message] == []
