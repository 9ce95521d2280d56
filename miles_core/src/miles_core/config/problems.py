"""Collects everything that is wrong with a run-file, and prints it in one report:

run.yaml:7   placement.mode: colocated  [ring-separate, miles-ring 0.1.0]
             a ring needs engines in processes of their own.   Do: transport: inprocess
run.yaml:12  schedule.max_stalness      unknown key. Did you mean `max_staleness`?
2 problems; nothing was started.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from miles_core.errors import ConfigError

MAX_SUBJECT = 44
"""Columns of the subject column; a longer subject puts its message on the next line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing wrong with a run-file.

    Example:
        Problem(path="schedule.steps", message="is missing", source="run.yaml", line=3, do="add `steps: 100`")
    """

    message: str
    """A sentence without the full stop."""
    path: str = ""
    """The dotted key, as the run-file spells it; empty if the whole file is meant."""
    value: str | None = None
    """The value that was found, as a user would write it; None if there is none."""
    source: str = ""
    """Name of the file, or ``--set #2``."""
    line: int | None = None
    """1-based."""
    rule: str | None = None
    """The id of the rule or check."""
    owner: str | None = None
    """The distribution and version that the rule or capability comes from: ``miles-ring 0.1.0``."""
    do: str | None = None
    """The remedy."""

    @property
    def place(self) -> str:
        return f"{self.source}:{self.line}" if self.line is not None else self.source

    @property
    def subject(self) -> str:
        if self.value is None:
            return self.path
        return f"{self.path} = {self.value}" if self.source.startswith("--set") else f"{self.path}: {self.value}"


class RunFileError(ConfigError):
    """A run-file with at least one problem; `problems` holds all of them, in file order."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = in_order(problems)
        # A line of its own before the table, since whoever prints an error puts something before its first line.
        super().__init__(f"the run-file does not describe a run\n{render_text(self.problems)}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,)


def in_order(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Problems of the file by line, then those of ``--set``. Equal problems appear once."""
    unique = list(dict.fromkeys(problems))
    return tuple(sorted(unique, key=lambda p: (p.source.startswith("--set"), p.line or 0, p.source)))


def summary(count: int) -> str:
    """The closing line of every report."""
    return f"{count} problem{'' if count == 1 else 's'}; nothing was started."


def render_text(problems: Sequence[Problem]) -> str:
    """The report for a terminal: a place, a subject and a message column, then the count."""
    if not problems:
        return "no problems."
    place_width = max(len(problem.place) for problem in problems)
    subject_width = min(MAX_SUBJECT, max(len(problem.subject) for problem in problems))
    lines: list[str] = []
    for problem in problems:
        lines += _render_one(problem, place_width, subject_width)
    return "\n".join([*lines, summary(len(problems))])


def _render_one(problem: Problem, place_width: int, subject_width: int) -> list[str]:
    message = problem.message.rstrip()
    if message and message[-1] not in ".?!":
        message += "."
    if problem.do:
        message += f"   Do: {problem.do}"
    tags = ", ".join(tag for tag in (problem.rule, problem.owner) if tag) if problem.rule else ""
    place = problem.place.ljust(place_width)
    if not tags and len(problem.subject) <= subject_width:
        subject = problem.subject.ljust(subject_width) + "  " if subject_width else ""
        return [f"{place}  {subject}{message}".rstrip()]
    head = f"{place}  {problem.subject.ljust(subject_width)}" + (f"  [{tags}]" if tags else "")
    return [head.rstrip(), f"{' ' * place_width}  {message}"]


def render_json(problems: Sequence[Problem]) -> str:
    """``{"ok": bool, "problems": [{path, message, value, source, line, rule, owner, do}]}``."""
    return json.dumps({"ok": not problems, "problems": [asdict(problem) for problem in problems]}, indent=2)
