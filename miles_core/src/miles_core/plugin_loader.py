"""Loads one plugin and reports its state. Nothing that a plugin does here can harm another plugin or the command.

This is one of the three places that may catch everything. The steps, each of which can end the matter:

    Requires-Dist excludes this miles-core   -> incompatible, not imported
    MILES_API is missing or another version  -> incompatible, not imported where its source can be read
    import raises or exits                   -> broken
    a hook is misspelt, a wrapper, or raises -> broken
    a descriptor cannot be used              -> broken
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib.util
import re
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from miles_core import __version__, hookspecs
from miles_core.capability import API, KINDS, Capability, State

HOOKS = {kind.hook: kind.name for kind in KINDS.values()}
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What loading a plugin led to."""

    state: State
    capabilities: tuple[tuple[str, Capability], ...] = ()
    """Pairs of kind and descriptor; empty unless the state is ok."""
    reason: str = ""
    do: str = ""
    trace: str = ""
    """The whole traceback when something was raised."""
    load_ms: float = 0.0
    """Time its import and hooks took."""


class _Refused(Exception):
    """The plugin breaks a rule of the framework; its message is the reason."""

    def __init__(self, reason: str, do: str = "", state: State = State.BROKEN) -> None:
        super().__init__(reason)
        self.reason, self.do, self.state = reason, do, state


def new_manager() -> pluggy.PluginManager:
    """A pluggy manager that knows the hookspecs."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def load_plugin(entry_point: EntryPoint, manager: pluggy.PluginManager) -> Outcome:
    """Load the plugin behind an entry point.

    Args:
        entry_point: From the group `miles.plugins`, with its distribution.
        manager: From `new_manager`; the plugin stays registered with it only when all went well.

    Returns:
        The outcome. Raises nothing but KeyboardInterrupt.
    """
    started = time.perf_counter()
    label = f"{_distribution_name(entry_point)}:{entry_point.name}"
    try:
        # A plugin that prints must not spoil `--json` on stdout.
        with contextlib.redirect_stdout(sys.stderr):
            _check_requirement(entry_point.dist)
            _check_api(_declared_api(entry_point.module), entry_point.module)
            module = entry_point.load()
            capabilities = _collect(module, label, manager)
    except KeyboardInterrupt:
        raise
    except _Refused as refusal:
        return Outcome(state=refusal.state, reason=refusal.reason, do=refusal.do)
    except BaseException as error:  # noqa: BLE001 - the plugin boundary: also sys.exit() in a plugin's import
        return Outcome(
            state=State.BROKEN,
            reason=_last_line(error),
            do=f"fix or remove it; {disable_hint(_distribution_name(entry_point))}",
            trace="".join(traceback.format_exception(error)),
        )
    return Outcome(state=State.OK, capabilities=capabilities, load_ms=(time.perf_counter() - started) * 1e3)


def disable_hint(name: str) -> str:
    return f"MILES_DISABLE_PLUGINS={name} leaves it out"


def _distribution_name(entry_point: EntryPoint) -> str:
    return entry_point.dist.metadata["Name"] if entry_point.dist else "unknown"


def _check_requirement(distribution: Distribution | None) -> None:
    for text in (distribution.requires or ()) if distribution else ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            raise _Refused(f"its metadata has an unreadable requirement {text!r}: {_last_line(error)}") from None
        if canonicalize_name(requirement.name) != "miles-core":
            continue
        if not requirement.specifier.contains(__version__, prereleases=True):
            raise _Refused(
                f"needs miles-core{requirement.specifier}, and {__version__} is installed",
                do="install a release of it for this miles-core",
                state=State.INCOMPATIBLE,
            )


def _check_api(found: object, module: str) -> None:
    """Compare a plugin's MILES_API with core's; `...` means it could not be read yet."""
    if found is ...:
        return
    where = f"`{module}`"
    if found is None:
        raise _Refused(
            f"{where} does not say which plugin API it was written for",
            do=f"add the line MILES_API = {API} to it",
            state=State.INCOMPATIBLE,
        )
    if not isinstance(found, int) or isinstance(found, bool):
        raise _Refused(
            f"MILES_API in {where} is not a literal number, so it would match every core",
            do=f"write MILES_API = {API}",
            state=State.INCOMPATIBLE,
        )
    if found != API:
        raise _Refused(
            f"written for plugin API {found}, and this miles-core has {API}",
            do="install a release of it for this miles-core",
            state=State.INCOMPATIBLE,
        )


def _declared_api(module: str) -> object:
    """Read MILES_API from the source without importing it.

    A plugin for another API may well fail to import here; reading first shows it as incompatible, which is what it is.

    Returns:
        The number; None when absent; a text when it is not a literal; ``...`` when there is no source to read.
    """
    source = _source_of(module)
    if source is None:
        return ...
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ...  # the import reports it better
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == "MILES_API" for target in targets):
            value = getattr(node, "value", None)
            return value.value if isinstance(value, ast.Constant) else "an expression"
    return None


def _source_of(module: str) -> bytes | None:
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)  # a top-level name: nothing is imported
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    places = [Path(folder, *rest) for folder in spec.submodule_search_locations or ()]
    candidates = [path for place in places for path in (place.with_suffix(".py"), place / "__init__.py")]
    if not rest:
        candidates = [Path(spec.origin)] if spec.origin else []
    for path in candidates:
        if path.suffix == ".py" and path.is_file():
            return path.read_bytes()
    return None


def _collect(module: ModuleType, label: str, manager: pluggy.PluginManager) -> tuple[tuple[str, Capability], ...]:
    if not isinstance(module, ModuleType):
        raise _Refused("its entry point must name a module, not an object in one", do='write name = "package.plugin"')
    _check_api(getattr(module, "MILES_API", None), module.__name__)
    _check_hooks(module, manager)
    try:
        manager.register(module, name=label)
        found = []
        for hook, kind in HOOKS.items():
            caller = getattr(manager.hook, hook)
            for implementation in caller.get_hookimpls():
                # Each plugin alone: pluggy's own call would stop everybody at the first one that raises.
                if implementation.plugin is module:
                    found += [(kind, each) for each in _call(implementation.function, hook)]
    except BaseException:
        if manager.is_registered(module):
            manager.unregister(module)
        raise
    return tuple(found)


def _check_hooks(module: ModuleType, manager: pluggy.PluginManager) -> None:
    marked = 0
    for attribute in dir(module):
        options = manager.parse_hookimpl_opts(module, attribute)
        if options is None:
            own = getattr(getattr(module, attribute), "__module__", None) == module.__name__
            if attribute in HOOKS and own:
                raise _Refused(f"`{attribute}` is not marked, so nobody would call it", do="put @hookimpl above it")
            continue
        marked += 1
        hook = options.get("specname") or attribute
        if hook not in HOOKS:
            close = difflib.get_close_matches(hook, HOOKS, n=1)
            raise _Refused(
                f"unknown hook `{hook}`",
                do=f"did you mean `{close[0]}`?" if close else "see miles_core.hookspecs for the hooks there are",
            )
        if options.get("wrapper") or options.get("hookwrapper"):
            raise _Refused(
                f"`{hook}` is a wrapper, which could replace other plugins' answers", do="return descriptors"
            )
        if options.get("tryfirst") or options.get("trylast"):
            raise _Refused(f"`{hook}` asks for an order, and there is none", do="use a bare @hookimpl")
    if not marked:
        raise _Refused("declares no hook", do="see docs/writing-a-plugin.md for the smallest plugin")


def _call(hook_function: Callable[[], Any], hook: str) -> list[Capability]:
    returned = hook_function()
    try:
        capabilities = list(returned)
    except TypeError:
        raise _Refused(
            f"`{hook}` returned {type(returned).__name__}, not a list of Capability",
            do="return [Capability(...)], or [] for nothing",
        ) from None
    for capability in capabilities:
        fault = _descriptor_fault(capability)
        if fault:
            raise _Refused(f"`{hook}`: {fault}", do="see miles_core.capability.Capability")
    return capabilities


def _descriptor_fault(capability: object) -> str | None:
    if not isinstance(capability, Capability):
        return f"returned a {type(capability).__name__} among its capabilities"
    name = capability.name
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return f"the name {name!r} is not kebab-case"
    if not 0 < len(capability.summary) <= 80 or "\n" in capability.summary:
        return f"the summary of `{name}` must be one line of 1 to 80 characters ({len(capability.summary)} found)"
    for field, target in (("load", capability.load), ("options", capability.options), ("memory", capability.memory)):
        if target is not None and not _TARGET.fullmatch(target):
            return f"`{field}` of `{name}` is {target!r}, not module:attribute"
    for need in capability.needs:
        try:
            Requirement(need)
        except InvalidRequirement:
            return f"`needs` of `{name}` has {need!r}, which is not a requirement"
    if odd := [each for each in capability.expects if not (each[0].isidentifier() and each[1].strip())]:
        return f"`expects` of `{name}` has {odd[0]!r}, not the name of a top-level module and a remedy"
    return None


def _last_line(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"calls sys.exit({error.code!r}) while it is imported"
    return traceback.format_exception_only(error)[-1].strip().splitlines()[0]
