"""`miles tito new`: a token family from a tokenizer folder alone, or the property that its template does not have."""

from __future__ import annotations

import datetime
import re
import shutil
from pathlib import Path

import click

from miles_core.errors import ConfigError, DataError
from miles_core.tito.check import check
from miles_core.tito.derive import Derived, derive
from miles_core.tito.probed import ProbedFamily
from miles_core.tokenizer import ChatTokenizer


@click.command("new")
@click.argument("name")
@click.option("--tokenizer", "folder", required=True, type=click.Path(path_type=Path), help="Hugging Face folder.")
@click.option("--template", type=click.Path(path_type=Path, exists=True), help="Instead of the folder's.")
@click.option("--date", type=click.DateTime(["%Y-%m-%d"]), help="What a template that asks for the date is told.")
@click.option("--output", type=click.Path(path_type=Path), help="Folder to create; miles-tito-NAME when left out.")
def command(
    name: str, folder: Path, template: Path | None, date: datetime.datetime | None, output: Path | None
) -> None:
    """Probe the chat template of a tokenizer and write the distribution miles-tito-NAME. Exit code 1 when it fails."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise ConfigError("the name is not kebab-case", expected="lower-case words with dashes", found=repr(name))
    target = output or Path(f"miles-tito-{name}")
    if target.exists():
        raise ConfigError("the folder exists", found=str(target), do="name another with --output")
    today = None if date is None else date.date()
    tokenizer = ChatTokenizer.from_dir(folder, today=today, template=template)
    derived = derive(tokenizer)
    family = family_of(derived).for_checkpoint(tokenizer)
    failed = [finding for finding in check(family) if finding.verdict == "FAILED"]
    if failed:
        shown = "\n".join(f"{each.property}: {each.scenario}: {each.detail}" for each in failed[:6])
        raise DataError(
            f"the derived family fails {len(failed)} time(s); nothing was written",
            found=shown,
            where=tokenizer.where,
            do="write the family by hand: see docs/kinds/tito_family.md",
        )
    write(target, name, derived, folder, tokenizer)
    click.echo(f"{target}: header {derived.header!r}, end {derived.end!r}, seam {derived.seam!r}")
    for line in notes(derived):
        click.echo(f"  {line}")
    click.echo(f"pip install --no-deps --no-build-isolation -e {target} && pytest {target}")


def family_of(derived: Derived) -> type[ProbedFamily]:
    """The class that the written file will hold."""
    values = {name: getattr(derived, name) for name in FIELDS}
    return type("Derived", (ProbedFamily,), {**values, "calls": derived.calls and derived.calls[1]})


FIELDS = (
    *("control_tokens", "stops", "replaced_stops", "end", "seam", "header", "opened", "unthought"),
    *("user", "system", "tool", "tool_group", "thoughts"),
)


def notes(derived: Derived) -> list[str]:
    """What a user must know of the derived family."""
    found = []
    if derived.calls is None:
        found.append("tool calls are spelled in no form known here: conversations with tools are refused")
    if derived.system is None:
        found.append("a system message in the middle is refused")
    if derived.forgets:
        found.append("the template drops reasoning once a user speaks again; the family keeps it")
    if derived.opened:
        found.append("a reply without reasoning keeps what its opener holds, which the template may leave out later")
    return found


def write(target: Path, name: str, derived: Derived, folder: Path, tokenizer: ChatTokenizer) -> None:
    """The distribution: package, descriptor, tests with the tokenizer they need."""
    module = f"miles_tito_{name.replace('-', '_')}"
    source, tests = target / "src" / module, target / "tests"
    source.mkdir(parents=True)
    (tests / "tokenizer").mkdir(parents=True)
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (folder / file).is_file():  # all but the first are optional
            shutil.copy(folder / file, tests / "tokenizer" / file)
    (tests / "tokenizer" / "chat_template.jinja").write_text(tokenizer.template().source, encoding="utf-8")
    summary = f"derived from {folder.resolve().name}"[:80]
    values = {"NAME": name, "MODULE": module, "SUMMARY": summary, "DATA": _data(derived)}
    values["NOTES"] = "\n".join(f"* {line[0].upper()}{line[1:]}." for line in notes(derived)) or "* None known."
    values["ROLES"] = str({"user", "assistant", "tool"} | ({"system"} if derived.system else set()))
    for path, text in FILES.items():
        for key, value in values.items():
            text = text.replace(f"@{key}@", value)
        (target / path.replace("@MODULE@", module)).write_text(text, encoding="utf-8")


def _data(derived: Derived) -> str:
    lines = [f"    {name} = {getattr(derived, name)!r}" for name in FIELDS]
    return "\n".join([*lines, f"    calls = {derived.calls[0] if derived.calls else None}"])


FILES = {
    "pyproject.toml": """[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "miles-tito-@NAME@"
version = "0.1.0"
description = "Token family @NAME@ for Miles"
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["miles-core>=0.1,<0.2"]

[project.entry-points."miles.plugins"]
tito-@NAME@ = "@MODULE@.plugin"

[tool.hatch.build.targets.wheel]
packages = ["src/@MODULE@"]
""",
    "README.md": """# miles-tito-@NAME@

The token family `@NAME@`, @SUMMARY@ by `miles tito new`. Its data is in `family.py`; every line is meant to be read and
changed. `pytest` proves it, and so does `miles tito check --family @NAME@ --tokenizer DIR`.

## Limits
@NOTES@
""",
    "CHANGELOG.md": """# Changelog

## 0.1.0

* Token family `@NAME@`.
""",
    "src/@MODULE@/__init__.py": '''"""Token family @NAME@ for Miles."""

__version__ = "0.1.0"
''',
    "src/@MODULE@/py.typed": "",
    "src/@MODULE@/plugin.py": '''"""Token family `@NAME@`."""

from __future__ import annotations

from collections.abc import Iterable

from miles_core.plugin import Capability, hookimpl

MILES_API = 1


@hookimpl
def miles_tito_families() -> Iterable[Capability]:
    return [
        Capability(
            name="@NAME@",
            summary="@SUMMARY@",
            load="@MODULE@.family:DerivedFamily",
            options="miles_core.tito.options:FamilyOptions",
        )
    ]
''',
    "src/@MODULE@/family.py": '''"""Token family `@NAME@`, @SUMMARY@."""

from __future__ import annotations

from miles_core.tito.family import Wrap
from miles_core.tito.formats import FunctionTags, JsonBlocks
from miles_core.tito.parser import Thoughts
from miles_core.tito.probed import ProbedFamily

__all__ = ["DerivedFamily", "FunctionTags", "JsonBlocks", "Thoughts", "Wrap"]


class DerivedFamily(ProbedFamily):
    """Rows are written from this data; only the preamble goes through the checkpoint's template."""

@DATA@
''',
    "tests/test_family.py": """from __future__ import annotations

from pathlib import Path

from miles_core.testing.tito_declared import DeclaredFamilyKit
from miles_core.tokenizer import ChatTokenizer
from @MODULE@.family import DerivedFamily

TOKENIZER = ChatTokenizer.from_dir(Path(__file__).parent / "tokenizer")


class TestFamily(DeclaredFamilyKit):
    family = DerivedFamily
    roles = frozenset(@ROLES@)

    def tokenizer(self, folder: Path) -> ChatTokenizer:
        return TOKENIZER
""",
}
