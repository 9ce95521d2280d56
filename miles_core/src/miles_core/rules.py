"""Rules over flat facts: evaluate them, and lint them so that a misspelt rule cannot silently never fire.

Pure, and ignorant of pydantic and of the run-file: facts are a mapping of path to value and of kind to tags. A
condition is

    path=value          the value at the path equals the literal; of a list, some element does
    path in (a, b)      it equals one of them
    kind:tag            the capability picked for that kind provides the tag

Literals are written as in YAML: ``null``, ``true``, numbers, bare text. No condition holds at a path the facts lack.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles_core.capability import KINDS, TAGS, Rule
from miles_core.errors import PluginError

_TAG = re.compile(r"(?P<kind>[a-z_]+):(?P<tag>[a-z0-9-]+)")
_EQUALS = re.compile(r"(?P<path>[a-z_]\w*(?:\.[a-z_]\w*)*)\s*=\s*(?P<value>.+)")
_IN = re.compile(r"(?P<path>[a-z_]\w*(?:\.[a-z_]\w*)*)\s+in\s+\((?P<values>.+)\)")
_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True, slots=True)
class Facts:
    """What is true of one run-file.

    Example:
        Facts({"placement.mode": "colocated", "transport.use": "ring"}, {"transport": frozenset({"cross-host"})})
    """

    values: Mapping[str, Any]
    """Dotted path in the run-file to its value; picks appear as ``<path>.use`` and ``<path>.<option>``."""
    tags: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Kind to the tags its picked capabilities provide, all of them together."""
    here: bool = True
    """Whether the run is to be started on this machine: only then does it matter what is installed and writable."""


def facts_of(values: dict[str, Any], tags: dict[str, frozenset[str]], *, here: bool = True) -> Facts:
    """A run-file as flat facts: ``section.key`` to value; a list of picks under its own path, as names."""
    flat: dict[str, Any] = {}

    def visit(path: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                visit(f"{path}.{key}" if path else key, item)
        elif isinstance(value, list):
            flat[path] = tuple(item["use"] if isinstance(item, dict) and "use" in item else item for item in value)
        else:
            flat[path] = value

    visit("", values)
    return Facts(flat, tags, here)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a `check` function reports."""

    path: str
    """Where in the run-file."""
    found: str
    """What is there and does not fit, one sentence."""


Check = Callable[[Facts], Iterable[Finding]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One rule that fired."""

    rule: Rule
    owner: str
    """Distribution and version the rule comes from."""
    paths: tuple[str, ...]
    """The paths involved, the most telling one first."""
    found: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One parsed condition: either `tag` of kind `subject`, or one of `values` at path `subject`."""

    subject: str
    values: tuple[str, ...] = ()
    tag: str | None = None

    @property
    def path(self) -> str:
        """The path to point a person at."""
        if self.tag is None:
            return self.subject
        kind = KINDS.get(self.subject)
        return (kind.section if kind else None) or self.subject

    def holds(self, facts: Facts) -> bool:
        if self.tag is not None:
            return self.tag in facts.tags.get(self.subject, frozenset())
        if self.subject not in facts.values:
            return False
        return any(_equal(facts.values[self.subject], text) for text in self.values)

    def describe(self, facts: Facts) -> str:
        """What the facts say about the condition, for an error message."""
        if self.tag is not None:
            verb = "provides" if self.holds(facts) else "does not provide"
            return f"{self.subject} {verb} `{self.tag}`"
        return f"{self.subject}: {_text(facts.values.get(self.subject))}"


@functools.cache
def parse(text: str) -> Condition:
    """Parse one condition.

    Raises:
        PluginError: the text has none of the three forms.
    """
    stripped = text.strip()
    if match := _TAG.fullmatch(stripped):
        return Condition(subject=match["kind"], tag=match["tag"])
    if match := _IN.fullmatch(stripped):
        return Condition(subject=match["path"], values=tuple(value.strip() for value in match["values"].split(",")))
    if match := _EQUALS.fullmatch(stripped):
        return Condition(subject=match["path"], values=(match["value"].strip(),))
    raise PluginError(
        "a rule's condition cannot be read",
        expected="`path=value`, `path in (a, b)` or `kind:tag`",
        found=repr(text),
    )


def evaluate(rules: Iterable[tuple[Rule, str]], facts: Facts, load: Callable[[str], Check]) -> list[Violation]:
    """Find every rule that fires.

    Args:
        rules: Rules in force, each with its owner ("miles-ring 0.1.0").
        facts: The run-file, flattened.
        load: Imports a rule's `check` by its ``module:function`` text; `registry.load_target` in a run.

    Returns:
        Violations in the order of the rules.

    Raises:
        PluginError: a condition cannot be read.
    """
    return [violation for rule, owner in rules for violation in _violations(rule, owner, facts, load)]


def _violations(rule: Rule, owner: str, facts: Facts, load: Callable[[str], Check]) -> list[Violation]:
    when = [parse(text) for text in rule.when]
    needs = [parse(text) for text in rule.needs]
    if not all(condition.holds(facts) for condition in when):
        return []
    if rule.check is not None:
        findings = load(rule.check)(facts)
        return [Violation(rule=rule, owner=owner, paths=(each.path,), found=each.found) for each in findings]
    unmet = [condition for condition in needs if not condition.holds(facts)]
    if needs and not unmet:
        return []
    # An unmet need is where a person would change something; what made it needed comes after.
    involved = [*unmet, *when]
    return [
        Violation(
            rule=rule,
            owner=owner,
            paths=tuple(dict.fromkeys(condition.path for condition in involved)),
            found=", ".join(condition.describe(facts) for condition in involved),
        )
    ]


def lint(rule: Rule, fields: Mapping[str, Callable[[str], bool]]) -> list[str]:
    """Say what is wrong with a rule itself.

    Args:
        rule: The rule.
        fields: Every path a run-file may have, each with a function that tells whether a literal can ever stand there.

    Returns:
        One sentence for each fault, empty when the rule is sound.
    """
    faults = []
    if not _ID.fullmatch(rule.id):
        faults.append(f"rule id {rule.id!r} is not kebab-case")
    if not rule.because.strip() or not rule.instead.strip():
        faults.append(f"rule `{rule.id}` must say `because` and `instead`")
    if not (rule.when or rule.needs or rule.check):
        faults.append(f"rule `{rule.id}` has no condition, so it would always fire")
    if rule.needs and rule.check:
        faults.append(f"rule `{rule.id}` has both `needs` and `check`; use one")
    for text in (*rule.when, *rule.needs):
        faults.extend(f"rule `{rule.id}`: {fault}" for fault in _condition_faults(text, fields))
    return faults


def _condition_faults(text: str, fields: Mapping[str, Callable[[str], bool]]) -> list[str]:
    try:
        condition = parse(text)
    except PluginError:
        return [f"{text!r} is neither `path=value`, `path in (a, b)` nor `kind:tag`"]
    if condition.tag is not None:
        faults = [] if condition.subject in KINDS else [f"there is no kind `{condition.subject}`"]
        return faults + ([] if condition.tag in TAGS else [f"there is no tag `{condition.tag}`"])
    if condition.subject not in fields:
        return [f"a run-file has no `{condition.subject}`"]
    possible = fields[condition.subject]
    return [f"`{condition.subject}` can never be {value!r}" for value in condition.values if not possible(value)]


def _equal(value: Any, text: str) -> bool:
    if isinstance(value, str):
        return value == text
    if value is None or isinstance(value, bool):
        return _text(value) == text
    if isinstance(value, int | float):
        try:
            return float(text) == value
        except ValueError:
            return False
    if isinstance(value, Sequence):
        return any(_equal(each, text) for each in value)
    return False


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(_text(each) for each in value) + "]"
    return str(value)
