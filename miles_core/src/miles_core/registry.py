"""What is installed: finds every plugin, and answers what a kind and a name stand for. One that fails harms no other.

The registry is built once, in the driver, and never changes. Worker processes do not look for plugins: they are given
`load` strings and import exactly those. Nothing here needs pydantic or torch, so that `miles plugins list` is instant.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from miles_core.capability import ENTRY_POINT_GROUP, KINDS, Capability, State
from miles_core.errors import PluginError
from miles_core.guesses import closest
from miles_core.known import FIRST_PARTY, KNOWN, home
from miles_core.plugin_loader import Outcome, load_plugin, new_manager
from miles_core.user_function import function_target, in_words

DISABLE_VARIABLE = "MILES_DISABLE_PLUGINS"
CORE = "miles-core"
USER = "run-file"
"""Stands for the distribution of a function that a run-file names."""
FUNCTION_KINDS = frozenset({"reward", "filter", "matcher", "advantage", "loss", "correction"})
"""Kinds for which a run-file may name a plain function: ``module:attr`` or ``file.py:fn``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One capability, the distribution that brings it, and whether a run-file may pick it."""

    kind: str
    capability: Capability
    distribution: str
    version: str
    plugin: str
    """Entry-point name."""
    state: State = State.OK
    reason: str = ""
    """Why it cannot be picked; empty when it can."""
    do: str = ""

    @property
    def name(self) -> str:
        return self.capability.name

    @property
    def owner(self) -> str:
        return f"{self.distribution} {self.version}".strip()

    @property
    def absent(self) -> tuple[tuple[str, str], ...]:
        """Modules it expects that this environment lacks, each with the remedy."""
        return tuple(each for each in self.capability.expects if importlib.util.find_spec(each[0]) is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """One plugin (an entry point), and how loading it went."""

    name: str
    module: str
    distribution: str
    version: str
    state: State
    reason: str = ""
    do: str = ""
    trace: str = ""
    load_ms: float = 0.0
    """Time its import and hooks took."""

    @property
    def owner(self) -> str:
        return f"{self.distribution} {self.version}".strip()


@dataclass(frozen=True, slots=True)
class Registry:
    """Everything that was found; see `discover`."""

    plugins: tuple[Plugin, ...]
    """Sorted by distribution and name; those that failed are among them."""
    capabilities: tuple[Entry, ...]
    """Sorted by kind (in the order of `KINDS`), name and distribution."""
    warnings: tuple[str, ...] = ()
    """Requests without effect, such as disabling a plugin that is not installed."""

    def entries(self, kind: str | None = None) -> tuple[Entry, ...]:
        """All capabilities, or those of one kind, whatever their state."""
        return tuple(entry for entry in self.capabilities if kind in (None, entry.kind))

    def get(self, kind: str, name: str) -> Entry:
        """The capability of that name.

        Raises:
            PluginError: there is none, or it cannot be used; says why, and what to do.
        """
        if kind not in KINDS:
            raise PluginError(f"there is no kind {kind!r}", expected=", ".join(KINDS), do=_did_you_mean(kind, KINDS))
        found = [entry for entry in self.capabilities if (entry.kind, entry.name) == (kind, name)]
        if not found:
            raise self._unknown(kind, name)
        # A table of ours gives way to those of plugins: where these conflict, their conflict is the reason.
        entry = min(found, key=lambda each: (each.state is not State.OK, each.state is State.DISABLED))
        if entry.state is not State.OK:
            alike = [each.owner for each in found if each.state is entry.state]
            raise PluginError(
                f"{kind} `{name}` of {' and '.join(alike)} cannot be used: {entry.reason}",
                found=str(entry.state),
                where=" and ".join(alike),
                do=entry.do,
            )
        return entry

    def resolve(self, kind: str, use: str, base: Path | None = None) -> Entry:
        """What a run-file's `use` stands for: a capability, or for kinds that are functions the user's own function.

        Args:
            kind: The kind.
            use: A capability's name, ``module:attr``, or ``file.py:fn``.
            base: Where the path of a file starts; None is the working directory.

        Raises:
            PluginError: see `get`; or the kind cannot be a function; or the file does not exist.
        """
        return self.get(kind, use) if ":" not in use else _user_function(kind, use, base or Path.cwd())

    def _unknown(self, kind: str, name: str) -> PluginError:
        usable = sorted(entry.name for entry in self.entries(kind) if entry.state is State.OK)
        message = f"no {kind} is named `{name}`"
        place = home(kind, name)
        failed = {
            str(canonicalize_name(each.distribution)): each for each in self.plugins if each.state is not State.OK
        }
        if place and place.distribution in failed:
            plugin = failed[place.distribution]
            return PluginError(
                f"{message}: {plugin.distribution}, which brings it, is {plugin.state}",
                found=plugin.reason,
                where=plugin.owner,
                do=plugin.do,
            )
        if place:
            do = f"`{name}` is in {place.distribution}: pip install {place.target} from the Miles repository"
        else:
            ours = [each for known, each in KNOWN if known == kind]
            do = _did_you_mean(name, [*usable, *ours]) or f"miles plugins list shows every {kind} there is"
        unloaded = ", ".join(f"{each.owner} ({each.state})" for each in failed.values())
        return PluginError(
            message,
            expected="one of " + ", ".join(usable) if usable else f"no {kind} is installed",
            found=f"not loaded: {unloaded}" if unloaded else None,
            do=do,
        )


def discover(disable: Iterable[str] = (), entry_points: Iterable[EntryPoint] | None = None) -> Registry:
    """Find and load every plugin.

    Args:
        disable: Distributions or entry points not to import, besides those named in MILES_DISABLE_PLUGINS.
        entry_points: For tests; by default those of the environment.

    Returns:
        The registry. A plugin that failed is listed with its state and the reason.
    """
    if entry_points is None:
        entry_points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    asked = {name.strip() for name in (*disable, *os.environ.get(DISABLE_VARIABLE, "").split(",")) if name.strip()}
    unwanted = {canonicalize_name(name): name for name in asked}
    manager = new_manager()
    plugins: list[Plugin] = []
    found: list[Entry] = []
    warnings: list[str] = []
    hit: set[str] = set()
    for entry_point in sorted(entry_points, key=lambda each: (_owner(each)[0], each.name)):
        distribution = canonicalize_name(_owner(entry_point)[0])
        names = {distribution, canonicalize_name(entry_point.name)} & unwanted.keys()
        hit |= names
        if names and distribution == CORE:
            warnings.append(f"{sorted(unwanted[name] for name in names)[0]}: core's own plugin cannot be disabled")
            names = set()
        outcome = _DISABLED if names else load_plugin(entry_point, manager)
        plugins.append(_plugin(entry_point, outcome))
        found += _entries(entry_point, outcome)
    warnings += [
        f"{unwanted[name]}: asked to disable it, but no such plugin is installed"
        for name in sorted(unwanted.keys() - hit)
    ]
    order = list(KINDS)
    entries = sorted(_with_conflicts(found), key=lambda each: (order.index(each.kind), each.name, each.distribution))
    return Registry(tuple(plugins), tuple(entries), tuple(warnings))


def load_target(target: str) -> Any:
    """Import the object that a capability's `load` or `options`, or a rule's `check`, names.

    Args:
        target: ``module:attribute``, or ``/absolute/file.py:function`` for a user's own function.

    Raises:
        PluginError: the module does not import, or has no such attribute.
    """
    place, _, attribute = target.rpartition(":")
    try:
        found: Any = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"`{target}` cannot be imported: {in_words(error)}",
            where=place,
            do="fix the module, or install what it imports",
        ) from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            close = _did_you_mean(name, [each for each in dir(found) if not each.startswith("_")])
            raise PluginError(f"`{target}` does not exist", found=f"`{place}` has no `{name}`", where=place, do=close)
        found = getattr(found, name)
    return found


_DISABLED = Outcome(
    state=State.DISABLED, reason="disabled by name", do=f"take it out of {DISABLE_VARIABLE} or plugins.disable"
)


def _plugin(entry_point: EntryPoint, outcome: Outcome) -> Plugin:
    distribution, version = _owner(entry_point)
    return Plugin(
        name=entry_point.name,
        module=entry_point.value,
        distribution=distribution,
        version=version,
        state=outcome.state,
        reason=outcome.reason,
        do=outcome.do,
        trace=outcome.trace,
        load_ms=outcome.load_ms,
    )


def _entries(entry_point: EntryPoint, outcome: Outcome) -> list[Entry]:
    distribution, version = _owner(entry_point)
    return [
        _with_needs(
            Entry(kind=kind, capability=each, distribution=distribution, version=version, plugin=entry_point.name),
            entry_point.dist,
        )
        for kind, each in outcome.capabilities
    ]


def _owner(entry_point: EntryPoint) -> tuple[str, str]:
    dist = entry_point.dist
    return (dist.metadata["Name"], dist.version) if dist else ("unknown", "")


def _with_needs(entry: Entry, distribution: Distribution | None) -> Entry:
    """The entry, unavailable if one of its `needs` is not installed."""
    for text in entry.capability.needs:
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate():
            continue
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            reason = f"needs {text}, which is not installed"
        else:
            if requirement.specifier.contains(installed, prereleases=True):
                continue
            reason = f"needs {text}, and {installed} is installed"
        # Ours are not on an index yet: naming one to pip would fetch whatever somebody put there.
        ours = entry.distribution in FIRST_PARTY
        extra = None if ours else _extra_with(requirement.name, distribution)
        wanted = f"{entry.distribution}[{extra}]" if extra else text
        return replace(entry, state=State.UNAVAILABLE, reason=reason, do=f"pip install '{wanted}'")
    return entry


def _extra_with(package: str, distribution: Distribution | None) -> str | None:
    """The extra of the distribution that brings the package, if one does."""
    for extra in (distribution.metadata.get_all("Provides-Extra") or ()) if distribution else ():
        for text in (distribution.requires or ()) if distribution else ():
            requirement = Requirement(text)
            same = canonicalize_name(requirement.name) == canonicalize_name(package)
            if same and requirement.marker and requirement.marker.evaluate({"extra": extra}) and "extra" in text:
                return str(extra)
    return None


def _with_conflicts(entries: Sequence[Entry]) -> list[Entry]:
    entries = [_unless_replaced(entry, entries) for entry in entries]
    live = [entry for entry in entries if entry.state is not State.DISABLED]
    claims = Counter((entry.kind, entry.name) for entry in live)
    return [
        _conflict(entry, live) if entry in live and claims[entry.kind, entry.name] > 1 else entry for entry in entries
    ]


def _unless_replaced(entry: Entry, entries: Sequence[Entry]) -> Entry:
    """No run-file names an architecture, so a user who installs one must want it instead of ours."""
    if entry.kind != "architecture" or entry.distribution not in FIRST_PARTY:
        return entry
    same = [each for each in entries if (each.kind, each.name) == (entry.kind, entry.name)]
    others = sorted({each.distribution for each in same} - FIRST_PARTY)
    if not others:
        return entry
    reason = f"that of {', '.join(others)} goes before it"
    return replace(entry, state=State.DISABLED, reason=reason, do=f"uninstall {others[0]} to use this one")


def _conflict(entry: Entry, entries: Sequence[Entry]) -> Entry:
    same = [each for each in entries if (each.kind, each.name) == (entry.kind, entry.name) and each is not entry]
    others = sorted({each.distribution for each in same} - {entry.distribution})
    if not others:
        return replace(
            entry, state=State.CONFLICT, reason="claimed twice by one distribution", do="rename one of the two"
        )
    removable = [each for each in others if each != CORE] or [entry.distribution]
    keeper = entry.distribution if removable != [entry.distribution] else CORE
    return replace(
        entry,
        state=State.CONFLICT,
        reason=f"also claimed by {', '.join(others)}",
        do=f"MILES_DISABLE_PLUGINS={','.join(removable)} keeps the one of {keeper}",
    )


def _did_you_mean(name: str, known: Iterable[str]) -> str | None:
    close = closest(name, known, cutoff=0.5)
    return f"did you mean `{close}`?" if close else None


def _user_function(kind: str, use: str, base: Path) -> Entry:
    if kind not in FUNCTION_KINDS:
        raise PluginError(
            f"`{use}` names a function, and {kind} is not a kind that can be one",
            expected=f"the name of an installed {kind}",
            do=f"miles plugins new {kind} NAME makes a plugin of your class",
        )
    capability = Capability(name=use, summary="a function of yours", load=function_target(kind, use, base))
    return Entry(kind=kind, capability=capability, distribution=USER, version="", plugin="")


def _load_file(path: Path) -> ModuleType:
    """Import a file under a name made from its path: equal in every process, and never that of an installed module."""
    name = f"miles_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
