"""Validates a run-file, and resolves its picks to capabilities. Plan and driver trust the typed result.

One pass collects everything that is wrong. A broken part never hides the others: what failed is left out, and checks
that would read it are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from miles_core.capability import KINDS, Capability, Rule, State, architecture_name
from miles_core.config import checks, translate
from miles_core.config.checks_async import ASYNC_CHECKS
from miles_core.config.checks_eval import EVAL_CHECKS
from miles_core.config.checks_model import MODEL_CHECKS
from miles_core.config.files import absolute, check_files, check_imports
from miles_core.config.load import KeyPath, Source, dotted
from miles_core.config.picks import SECTIONS, default_pick
from miles_core.config.problems import Problem, RunFileError
from miles_core.config.salvage import left, whole, without
from miles_core.config.spec import RewardPick, RunSpec
from miles_core.config.true_on_policy import TRUE_ON_POLICY
from miles_core.config.unused import check_unused
from miles_core.errors import PluginError
from miles_core.registry import USER, Entry, Registry, load_target
from miles_core.rules import Facts, Violation, evaluate, facts_of, parse
from miles_core.user_function import function_target, in_words

CORE_CHECKS = (*checks.CHECKS, *ASYNC_CHECKS, *EVAL_CHECKS, *MODEL_CHECKS, *TRUE_ON_POLICY)
"""What must hold between core's own keys."""
DEFAULT_TRACKER = "tensorboard"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A resolved pick: the capability, the distribution it comes from, and its validated options (None if it has
    none)."""

    kind: str
    capability: Capability
    distribution: str
    version: str
    options: Any

    @property
    def owner(self) -> str:
        return f"{self.distribution} {self.version}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRun:
    """A run-file that passed validation. Kinds with one pick are in `one`, kinds with several in `many`."""

    spec: RunSpec
    """Every default filled in, the picks' options included; paths of model and data are absolute."""
    one: dict[str, Resolved]
    """Has no `tito_family` if the run-file leaves it to the checkpoint, and no kind that was left unread."""
    many: dict[str, tuple[Resolved, ...]]
    """In the order of the run-file; `reward` lines up with `spec.rewards`."""
    architectures: Mapping[str, str] = field(default_factory=dict)
    """The `load` of every architecture that a plugin provides, by name. The checkpoint decides which is used."""


Look = Callable[[ResolvedRun], Iterable[checks.Found]]
"""What opens parts of a run whose keys are sound, to find out what only they can tell."""


@dataclass(slots=True)
class _Work:
    """What is known so far."""

    source: Source
    registry: Registry
    problems: list[Problem]
    broken: list[KeyPath] = field(default_factory=list)
    """Paths whose values must not be read."""
    unresolved: set[str] = field(default_factory=set)
    """Kinds with a pick that could not be resolved."""
    unread: Collection[KeyPath] = ()
    """Sections, and keys of sections, that whoever asks does not read."""
    picked: list[tuple[KeyPath, Entry, Any]] = field(default_factory=list)
    """Path, capability and options of each pick that resolved."""

    def report(self, path: KeyPath, message: str, *, at: KeyPath | None = None, **parts: Any) -> None:
        origin = self.source.origin(at or path)
        self.problems.append(
            Problem(path=dotted(path), message=message, source=origin.source, line=origin.line, **parts)
        )


def check_run(
    source: Source,
    registry: Registry,
    *,
    files: bool = True,
    look: Look | None = None,
    unread: Collection[KeyPath] = (),
) -> tuple[ResolvedRun | None, list[Problem]]:
    """Validate everything. Returns the run, or None, and every problem that was found.

    Args:
        source: The run-file as loaded.
        registry: What is installed.
        files: Also look whether this machine has what the run needs: model folder, data, modules and programs.
        look: Also asked, once every key is sound.
        unread: Sections, and keys of sections, that the caller does not read. Nothing in them is a problem, nor is what
            depends on them.
    """
    source = replace(source, tree=left(source.tree, unread))
    work = _Work(source, registry, list(source.problems), unread=unread)
    spec = _read_core(work)
    for kind, path, raw in _raw_picks(source.tree):
        if not any(path[: len(gone)] == gone for gone in unread):
            _resolve_pick(work, kind, path, raw)
    if spec is None:
        return None, work.problems
    values = _completed(work, spec)
    _apply_rules(work, values, here=files)
    _apply_checks(work, translate.strict(RunSpec, values), files=files)
    unsound = work.broken or work.unresolved or source.problems
    if unsound or (work.problems and look is None):
        return None, work.problems
    run = _resolved_run(work, translate.strict(RunSpec, _with_absolute_paths(values)))
    if look is not None:
        _report_findings(work, run.spec, look(run))
    return (None if work.problems else run), work.problems


def _resolved_run(work: _Work, spec: RunSpec) -> ResolvedRun:
    one = {entry.kind: _resolved(entry, options) for _, entry, options in work.picked if not KINDS[entry.kind].many}
    many: dict[str, tuple[Resolved, ...]] = {kind: () for kind in SECTIONS if KINDS[kind].many}
    for _, entry, options in work.picked:
        if KINDS[entry.kind].many:
            many[entry.kind] = (*many[entry.kind], _resolved(entry, options))
    if spec.tracking.trackers is None:
        many["tracker"] = _default_trackers(work.registry)
    architectures = {
        entry.name: entry.capability.load for entry in work.registry.entries("architecture") if entry.state is State.OK
    }
    return ResolvedRun(spec=spec, one=one, many=many, architectures=architectures)


def resolve(
    source: Source,
    registry: Registry,
    *,
    files: bool = True,
    look: Look | None = None,
    unread: Collection[KeyPath] = (),
) -> ResolvedRun:
    """Validate a loaded run-file against what is installed; see `check_run`.

    Raises:
        RunFileError: with all problems at once.
    """
    run, problems = check_run(source, registry, files=files, look=look, unread=unread)
    if run is None:
        raise RunFileError(problems)
    return run


# --- core sections ----------------------------------------------------------------------------------------------------


def _read_core(work: _Work) -> RunSpec | None:
    """The core sections; where they are wrong, the spec of what is left once the wrong values are taken out."""
    tree: dict[str, Any] = dict(work.source.tree)
    if tree.get("eval", ...) is None:  # off, as its defaults are: `--set eval=null` takes the whole section away
        del tree["eval"]
    parsed = translate.read(RunSpec, tree, work.source)
    work.problems += parsed.problems
    for _ in range(8):  # taking out a value may leave a required key missing, so it takes a few rounds
        if parsed.model is not None:
            return RunSpec.model_validate(parsed.model)
        gone = {whole(path) for path in parsed.broken}
        work.broken += [*parsed.broken, *gone]
        tree = without(tree, gone)
        parsed = translate.read(RunSpec, tree, work.source)
    return None


# --- picks ------------------------------------------------------------------------------------------------------------


def _raw_picks(tree: dict[str, Any]) -> Iterator[tuple[str, KeyPath, Any]]:
    """Kind, path and raw value of every pick, defaults included; what is no pick is reported with the core sections."""
    for kind, section in SECTIONS.items():
        found: Any = tree
        for part in section:
            found = found.get(part) if isinstance(found, dict) else None
        if not KINDS[kind].many:
            raw = default_pick(kind) if found is None else found
            if raw is not None:
                yield kind, section, raw
        elif isinstance(found, list):
            for index, raw in enumerate(found):
                yield kind, (*section, index), raw


def _resolve_pick(work: _Work, kind: str, path: KeyPath, raw: Any) -> None:
    written = {"use": raw} if isinstance(raw, str) else raw
    if not isinstance(written, dict) or not isinstance(written.get("use"), str):
        work.unresolved.add(kind)
        return
    use = written["use"]
    try:
        entry = work.registry.resolve(kind, use)
        model = load_target(entry.capability.options) if entry.capability.options else None
    except (OSError, ValueError) as error:  # a function's file whose name the file system refuses
        work.unresolved.add(kind)
        work.report(path, f"cannot be looked up: {error}", do="correct the name")
        return
    except PluginError as error:
        work.unresolved.add(kind)
        where = path if isinstance(raw, str) else (*path, "use")
        written_here = path in work.source.origins
        shown = translate.show(use) + ("" if written_here else " (default)")
        work.report(where, _sentence(error), value=shown, do=error.do)
        return
    own = set(RewardPick.model_fields) if kind == "reward" else {"use"}
    options = {key: value for key, value in written.items() if key not in own}
    parsed = translate.read_options(model, options, work.source, path, owner=entry.owner)
    work.problems += parsed.problems
    work.broken += parsed.broken
    work.picked.append((path, entry, parsed.model))


def _sentence(error: PluginError) -> str:
    parts = [error.message]
    if error.expected:
        parts.append(f"expected {error.expected}")
    if error.found and not (error.do or "").startswith("did you mean"):
        parts.append(error.found)
    return "; ".join(parts)


def _default_trackers(registry: Registry) -> tuple[Resolved, ...]:
    usable = [entry for entry in registry.entries("tracker") if entry.name == DEFAULT_TRACKER]
    return tuple(_resolved(entry, None) for entry in usable if entry.state is State.OK)


def _resolved(entry: Entry, options: Any) -> Resolved:
    return Resolved(
        kind=entry.kind,
        capability=entry.capability,
        distribution=entry.distribution,
        version=entry.version,
        options=options,
    )


def _completed(work: _Work, spec: RunSpec) -> dict[str, Any]:
    """The spec as plain values, each pick with the defaults of its options."""
    values: dict[str, Any] = spec.model_dump(mode="json")
    for path, _, options in work.picked:
        at: Any = values
        for part in path[:-1]:
            at = at[part]
        if options is not None:
            at[path[-1]] = {**at[path[-1]], **options.model_dump(mode="json")}
    return values


def _with_absolute_paths(values: dict[str, Any]) -> dict[str, Any]:
    """Make paths absolute. They are relative to where the command was started, which workers on other hosts do not
    know."""
    places = [(values["model"], "path")] + [(values["data"], key) for key in ("train", "eval") if values["data"]]
    for section, key in places:
        if section[key] is not None:
            section[key] = str(absolute(section[key]))
    return values


# --- rules and checks -------------------------------------------------------------------------------------------------


def _tags(work: _Work) -> dict[str, frozenset[str]]:
    tags: dict[str, frozenset[str]] = {}
    for _, entry, _ in work.picked:
        tags[entry.kind] = tags.get(entry.kind, frozenset()) | entry.capability.provides
    return tags


def _is_broken(work: _Work, path: str) -> bool:
    """Whether the value at `path`, or one inside or around it, must not be read."""
    return _overlaps(path, (*work.broken, *work.unread))


def _is_unknown(work: _Work, kind: str) -> bool:
    """Whether nobody can tell what the capability of a kind provides."""
    return kind in work.unresolved or (kind in SECTIONS and _overlaps(dotted(SECTIONS[kind]), work.unread))


def _overlaps(path: str, gone: Iterable[KeyPath]) -> bool:
    parts = path.split(".")
    return any(all(str(a) == b for a, b in zip(each, parts, strict=False)) for each in gone)


def _apply_rules(work: _Work, values: dict[str, Any], *, here: bool) -> None:
    facts = facts_of(values, _tags(work), here=here)
    for path, entry, _ in work.picked:
        for rule in entry.capability.rules:
            _apply_rule(work, rule, entry.owner, path, facts)


def _apply_rule(work: _Work, rule: Rule, owner: str, path: KeyPath, facts: Facts) -> None:
    try:
        conditions = [parse(text) for text in (*rule.when, *rule.needs)]
        reads_broken = any(
            _is_unknown(work, condition.subject) if condition.tag else _is_broken(work, condition.subject)
            for condition in conditions
        )
        if reads_broken or (rule.check and (work.broken or work.unresolved)):
            return
        violations = evaluate([(rule, owner)], facts, _guarded)
    except PluginError as error:
        work.report(path, f"a rule cannot be applied: {_sentence(error)}", rule=rule.id, owner=owner, do=error.do)
        return
    for violation in violations:
        _report_violation(work, violation, facts, path)


def _guarded(target: str) -> Callable[[Facts], Any]:
    """Call the check function of a plugin, and turn its failures into PluginError. This is a boundary to code that is
    not ours."""
    function = load_target(target)

    def call(facts: Facts) -> Any:
        try:
            return list(function(facts))
        except Exception as error:
            raise PluginError(f"`{target}` raised {in_words(error)}") from error

    return call


def _report_violation(work: _Work, violation: Violation, facts: Facts, pick: KeyPath) -> None:
    """Report at the first path involved that is written in the file, or else at the pick that the rule belongs to."""
    rule = violation.rule
    message = rule.because if rule.check is None else f"{violation.found}; {rule.because}"
    candidates = [tuple(path.split(".")) for path in violation.paths]
    written = [path for path in candidates if work.source.has(path)]
    path = (written or candidates)[0]
    value = facts.values.get(dotted(path), facts.values.get(f"{dotted(path)}.use"))
    shown = translate.show(list(value) if isinstance(value, tuple) else value)
    if not written:
        shown += " (default)"
    at = path if written else pick
    work.report(path, message, at=at, value=shown, rule=rule.id, owner=violation.owner, do=rule.instead)


def _apply_checks(work: _Work, spec: RunSpec, *, files: bool) -> None:
    setup = checks.Setup(spec=spec, tags=_tags(work), model=None)
    if files and not _is_broken(work, "model.path"):
        setup = setup.with_model(absolute(spec.model.path))
        _check_table(work, setup)
    _report_findings(work, spec, [*checks.run_checks(setup, CORE_CHECKS), *check_unused(setup)])
    if files:
        _report_findings(work, spec, [*check_files(spec), *check_imports(_functions(work, spec))])


def _functions(work: _Work, spec: RunSpec) -> Iterator[tuple[str, str]]:
    """(path, target) of the functions that the run-file itself names. Losses run in trainer ranks, whose hosts may have
    other packages than this one."""
    for path, entry, _ in work.picked:
        if entry.distribution == USER and entry.kind != "loss":
            yield dotted(path), entry.capability.load
    if spec.eval.every_steps is not None and spec.eval.on == "external" and spec.eval.function is not None:
        with suppress(PluginError):  # which MIL212 tells
            yield "eval.function", function_target("evaluation", spec.eval.function)


def _report_findings(work: _Work, spec: RunSpec, findings: Iterable[checks.Found]) -> None:
    for finding in findings:
        if any(_is_broken(work, path) for path in finding.reads) or any(_is_unknown(work, k) for k in finding.kinds):
            continue
        path: KeyPath = tuple(int(part) if part.isdecimal() else part for part in finding.path.split("."))
        value = checks.value_at(spec, finding.path) if finding.show else None
        if isinstance(value, dict) and "use" in value:
            value = value["use"]
        shown = translate.show(value) if finding.show else None
        work.report(path, finding.message, value=shown, rule=finding.id, do=finding.do)


def _check_table(work: _Work, setup: checks.Setup) -> None:
    """The checkpoint picks a table by its class; one that plugins bring and that cannot be used is no reason to fall
    back on another without a word."""
    if setup.model is None or not setup.provides("backend", "reads-tables"):
        return
    name = architecture_name(setup.model.architecture)
    if not any(entry.name == name for entry in work.registry.entries("architecture")):
        return
    try:
        work.registry.get("architecture", name)
    except PluginError as error:
        work.report(("model", "path"), _sentence(error), value=translate.show(setup.spec.model.path), do=error.do)
