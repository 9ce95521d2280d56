"""Write the generated pages of the documentation, or with --check say which are out of date.

    python docs/generate.py [--check]

They describe first-party capabilities only, so that the pages do not depend on what else is installed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from miles_core.capability import KINDS, State
from miles_core.cli.plugin_show import REQUIRED, describe_fields, options_of
from miles_core.config import translate
from miles_core.config.files import FILE_CHECKS
from miles_core.config.picks import SECTIONS
from miles_core.config.resolve import CORE_CHECKS
from miles_core.config.spec import Pick, RunSpec, Section
from miles_core.config.unused import UNUSED
from miles_core.known import KNOWN
from miles_core.registry import FUNCTION_KINDS, Entry, Registry, discover
from miles_core.tracking.names import as_markdown

DOCS = Path(__file__).parent
NOTE = "<!-- Written by docs/generate.py; edit the models and rules it reads, then run `make docs`. -->"

RUN_FILE_HEAD = """\
# The run-file

A run is described by one file in YAML 1.2 (or in TOML, if its name ends in `.toml`). The tables below list the sections
of the core. The parts that do the work are *picked* by name, and the options of a pick are written beside its name:

    name: first
    model: models/smollm2-135m            # short for {path: models/smollm2-135m}
    data: train.jsonl                     # short for {train: train.jsonl}
    rewards: [reward.py:score]            # your own function
    advantage: grpo                       # short for {use: grpo}
    loss: {use: ppo-clip, high: 0.28}     # a pick with an option
    schedule: {steps: 60}

* `miles validate run.yaml` reports everything that is wrong at once, each with its line and remedy. Exit code 2.
  Once the keys are right it also looks at what the start needs: the first rows of the data, the token family on the
  model's tokenizer, what your functions import, the agent's program, the Python that has SGLang. It starts nothing.
* `miles init` writes a commented run-file for what is installed; `miles schema` prints a JSON schema for your editor.
* `--set section.key=value` overrides one value, read as YAML: `--set optimizer.lr=1e-5`, `--set rewards.0.weight=2`.
  Setting a pick replaces it whole (`--set transport=broadcast`), so that no option of the old one lingers.
* Relative paths are relative to where you start `miles`, not to the file.
* Values are those of YAML 1.2: `1e-6` is a number, `on` and `12:30` are text, a key written twice is an error. Text is
  never taken for a number, nor `true` for 1. TOML has no null; leave the key out, or use YAML.
* A key that the run would not read is an error. The run directory keeps the file as `run.yaml`, with every default
  written out.

The page [Compatibility](compatibility.md) says what may be combined with what.
"""

COMPATIBILITY_HEAD = """\
# Compatibility

`miles validate` applies everything on this page before a run takes any process, GPU or port, and reports all violations
together. A report gives the id of each violation in brackets; look for it among the headings here.

A rule belongs to the capability under which it is listed, and applies only if a run-file picks that capability. Checks
named `MIL` belong to the core. Plugins have rules of their own; `miles plugins show KIND NAME` prints them.
"""


@cache
def installed() -> Registry:
    return discover()


def first_party(kind: str) -> list[Entry]:
    """Usable or merely uninstalled capabilities of this repository, in the registry's order."""
    return [
        entry
        for entry in installed().entries(kind)
        if (entry.distribution == "miles-core" or (kind, entry.name) in KNOWN)
        and entry.state in (State.OK, State.UNAVAILABLE)
    ]


def run_file_page() -> str:
    """docs/run-file.md"""
    lines = [NOTE, "", RUN_FILE_HEAD, "## Top level", "", *_key_table(RunSpec)]
    for path, model in _sections(RunSpec):
        lines += ["", f"## `{path}`", "", *_key_table(model)]
    lines += ["", "## Picks", ""]
    for kind, section in SECTIONS.items():
        lines += _pick_block(kind, ".".join(section))
    return "\n".join(lines) + "\n"


def _sections(model: type[BaseModel], prefix: str = "") -> Iterable[tuple[str, type[BaseModel]]]:
    for name, info in model.model_fields.items():
        nested = translate.submodel(info.annotation)
        if nested is not None and issubclass(nested, Section):
            yield prefix + name, nested
            yield from _sections(nested, f"{prefix}{name}.")


def _key_table(model: type[BaseModel]) -> list[str]:
    rows = []
    for field in describe_fields(model):
        nested = translate.submodel(model.model_fields[field["name"]].annotation)
        many = str(field["type"]).startswith("list")
        if nested is not None:
            kind = "pick" if issubclass(nested, Pick) else "section"
            shown = f"list of {kind}s" if many else kind
            value = model.model_fields[field["name"]].default
            default = f"`{value.use}`" if isinstance(value, Pick) else _default(value) if kind == "pick" else ""
        else:
            shown, default = str(field["type"]), _default(field["default"])
        rows.append((f"`{field['name']}`", shown, default, field["description"]))
    return _table(("key", "type", "default", "meaning"), rows)


def _default(default: Any) -> str:
    if default is PydanticUndefined or default == REQUIRED:
        return "**required**"
    return f"`{json.dumps(default)}`" if isinstance(default, list | dict) else f"`{translate.show(default)}`"


def _pick_block(kind: str, section: str) -> list[str]:
    many = "any number" if KINDS[kind].many else "one"
    own = (
        " Your own function may stand here as `module:function` or `file.py:function`."
        if kind in FUNCTION_KINDS
        else ""
    )
    lines = [
        f"### `{section}`" if section == kind else f"### `{section}`: {kind.replace('_', ' ')}",
        "",
        f"{KINDS[kind].summary[0].upper()}{KINDS[kind].summary[1:]}; {many} in a run.{own}",
    ]
    for entry in first_party(kind):
        lines += ["", f"**`{entry.name}`** ({entry.distribution}): {entry.capability.summary}."]
        options = [
            (f"`{each['name']}`", str(each["type"]), _default(each["default"]), str(each["description"]))
            for each in options_of(entry)
        ]
        if options:
            lines += ["", *_table(("option", "type", "default", "meaning"), options)]
    return [*lines, ""]


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    body = ["| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return ["| " + " | ".join(header) + " |", "|" + "---|" * len(header), *body]


def compatibility_page() -> str:
    """docs/compatibility.md"""
    lines = [NOTE, "", COMPATIBILITY_HEAD, "## Keys of the core", ""]
    for check in sorted(CORE_CHECKS, key=lambda each: each.id):
        lines += [f"### {check.id}", "", f"{check.about} Do: {check.do}.", ""]
    lines += ["## Files", ""]
    for file_check in FILE_CHECKS:
        lines += [f"### {file_check.id}", "", file_check.about, ""]
    lines += [
        "## Keys that would have no effect",
        "",
        "Setting one of these to other than its default is an error.",
        "",
    ]
    for unused in UNUSED:
        keys = ", ".join(f"`{path}`" for path in unused.paths)
        lines += [f"### {unused.id}", "", f"{keys}: {unused.because}. Do: {unused.do}.", ""]
    lines += ["## Rules of capabilities", ""]
    for kind in SECTIONS:
        for entry in first_party(kind):
            for rule in entry.capability.rules:
                lines += [f"### {rule.id}", "", *_rule_text(entry, rule.when, rule.needs)]
                lines += [f"Because {rule.because}. Do: {rule.instead}.", ""]
    return "\n".join(lines)


def _rule_text(entry: Entry, when: tuple[str, ...], needs: tuple[str, ...]) -> list[str]:
    conditions = " and ".join(f"`{condition}`" for condition in when)
    subject = f"{entry.kind} `{entry.name}` ({entry.distribution})"
    if needs:
        wanted = " and ".join(f"`{condition}`" for condition in needs)
        return [f"{subject} needs {wanted}{f' when {conditions}' if when else ''}.", ""]
    return [f"{subject} refuses {conditions or 'what its check finds'}.", ""]


PAGES: dict[str, Callable[[], str]] = {
    "run-file.md": run_file_page,
    "compatibility.md": compatibility_page,
    "metrics.md": as_markdown,
}


def outdated() -> list[str]:
    """Names of pages whose text is not what would be written now."""
    return [name for name, make in PAGES.items() if not (DOCS / name).is_file() or (DOCS / name).read_text() != make()]


def main(arguments: list[str]) -> int:
    """Write all pages; with --check only compare."""
    if "--check" in arguments:
        stale = outdated()
        for name in stale:
            print(f"docs/{name} is out of date: run `make docs`")
        return 1 if stale else 0
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), encoding="utf-8")
        print(f"wrote docs/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
