"""`miles tito check`: every property of a token family on one checkpoint, as a table and an exit code.

The properties are those of the conformance kit (`miles_core.tito.check`). Beside them stands the comparison with the
checkpoint's own chat template, and what the server does with an image.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from miles_core.capability import State
from miles_core.cli import table
from miles_core.errors import ConfigError
from miles_core.kinds.tito_family import TitoFamily
from miles_core.registry import Entry, discover, load_target
from miles_core.tito.check import Finding, Verdict, check
from miles_core.tito.family import DeclaredFamily
from miles_core.tito.probes import PROBES, difference
from miles_core.tokenizer import ChatTokenizer


@click.command("check")
@click.option("--family", required=True, help="A token family that is installed; see `miles plugins list`.")
@click.option("--tokenizer", "folder", required=True, type=click.Path(path_type=Path), help="Hugging Face folder.")
@click.option(
    "--template", type=click.Path(path_type=Path, exists=True), help="A chat template file, instead of the folder's."
)
@click.option("--date", type=click.DateTime(["%Y-%m-%d"]), help="What a template that asks for the date is told.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable, on stdout.")
def command(family: str, folder: Path, template: Path | None, date: datetime.datetime | None, as_json: bool) -> None:
    """Prove FAMILY on a tokenizer: rows, replies, streams, stops, its template. Exit code 1 on a failure."""
    today = None if date is None else date.date()
    tokenizer = ChatTokenizer.from_dir(folder, today=today, template=template)
    found: list[tuple[str, Finding]] = []
    for mode, made in modes(family_named(family), tokenizer, today):
        found += [(mode, finding) for finding in check(made)]
        found += [(mode, finding) for finding in template_findings(made) if mode == "default"]
    found.append(("", image_finding()))
    if as_json:
        click.echo(
            json.dumps([{"mode": mode, **asdict(finding)} for mode, finding in found], indent=2, ensure_ascii=False)
        )
    else:
        click.echo(report(found))
    failed = sum(finding.verdict == "FAILED" for _, finding in found)
    click.get_current_context().exit(1 if failed else 0)


def family_named(name: str) -> Entry:
    """The installed family.

    Raises:
        ConfigError: no usable family has the name.
    """
    entries = {entry.name: entry for entry in discover().entries("tito_family")}
    if name not in entries or entries[name].state is not State.OK:
        raise ConfigError(f"no usable token family is called {name!r}", expected=f"one of {sorted(entries)}")
    return entries[name]


def modes(entry: Entry, tokenizer: ChatTokenizer, today: datetime.date | None) -> Iterator[tuple[str, TitoFamily]]:
    """The family with its default options, and with thinking the other way where it has that option.

    Args:
        today: Also the family's option `date`, where it has one and a date is given.
    """
    made: type[Any] = load_target(entry.capability.load)
    options: type[Any] | None = load_target(entry.capability.options) if entry.capability.options else None
    if options is None:
        yield "default", made(None, tokenizer)
        return
    dated = {"date": today.isoformat()} if today is not None and "date" in options.model_fields else {}
    default = options(**dated)
    yield "default", made(default, tokenizer)
    if "thinking" in options.model_fields:
        yield (
            f"thinking: {str(not default.thinking).lower()}",
            made(options(thinking=not default.thinking, **dated), tokenizer),
        )


def template_findings(family: TitoFamily) -> Iterator[Finding]:
    """Where the family's rows are the checkpoint's template's; a difference it does not declare is a failure."""
    if not isinstance(family, DeclaredFamily):
        return
    for name, probe in PROBES.items():
        shown = difference(family, probe)
        reason = family.deliberate.get(name)
        verdict: Verdict = "ok" if shown is None else "refused" if reason is not None else "FAILED"
        detail = "" if shown is None else f"deliberate: {reason}" if reason is not None else shown
        yield Finding(property="is the template's row", scenario=name, verdict=verdict, detail=detail)


def image_finding() -> Finding:
    """The server refuses an image before a family sees it; token rows hold text alone."""
    from miles_core.session.serving.chat import read_message
    from miles_core.session.serving.problems import Refused

    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    try:
        read_message({"role": "user", "content": [image]}, "messages.0")
    except Refused:
        return Finding(property="image input is refused", scenario="", verdict="ok")
    return Finding(
        property="image input is refused", scenario="", verdict="FAILED", detail="an image was taken for text"
    )


def report(found: list[tuple[str, Finding]]) -> str:
    """The table, then a line for everything that is not plainly ok."""
    counts: dict[tuple[str, str], dict[str, int]] = {}
    for mode, finding in found:
        row = counts.setdefault((finding.property, mode), dict.fromkeys(("ok", "refused", "FAILED"), 0))
        row[finding.verdict] += 1
    rows = [(_mark(row), name, mode, *(str(row[key]) for key in row)) for (name, mode), row in counts.items()]
    text = table.render(("", "PROPERTY", "MODE", "OK", "REFUSED", "FAILED"), rows, width=table.terminal_width())
    notes = [
        f"refused: {finding.scenario}: {finding.detail}"
        if finding.verdict == "refused"
        else f"FAILED: {finding.property}: {finding.scenario}{f' ({mode})' if mode else ''}: {finding.detail}"
        for mode, finding in sorted(found, key=lambda each: each[1].verdict == "FAILED")
        if finding.verdict != "ok"
    ]
    return "\n".join([text, *dict.fromkeys(notes)])


def _mark(row: Mapping[str, int]) -> str:
    return "FAILED" if row["FAILED"] else "ok"
