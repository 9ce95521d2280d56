"""Which token family (TITO family) serves a checkpoint: the one that is named, or the one that claims it."""

from __future__ import annotations

from collections.abc import Callable

from miles_core.capability import State
from miles_core.config.resolve import ResolvedRun
from miles_core.kinds.tito_family import TitoFamily
from miles_core.registry import Registry, load_target
from miles_core.session.factory import DEFAULT_FAMILY, choose_family
from miles_core.tokenizer import ChatTokenizer


def pick_family(
    resolved: ResolvedRun, registry: Registry, tokenizer: ChatTokenizer, *, warn: Callable[[str], None]
) -> TitoFamily:
    """The family that the run-file names, else the installed one that claims the checkpoint; see `claimed_family`.

    Args:
        tokenizer: Of the run's model.
        warn: Also told when the named family does not claim the checkpoint: chats may be written in another model's
            format, which trains without any error.
    """
    pick = resolved.one.get("tito_family")
    if pick is None:
        return claimed_family(tokenizer, registry, warn=warn)
    kind = load_target(pick.capability.load)
    family: TitoFamily = kind(pick.options, tokenizer)
    if pick.capability.name != DEFAULT_FAMILY and not kind.claims(tokenizer):
        name = pick.capability.name
        warn(
            f"session.family names {name}, which does not claim {tokenizer.where}: chats may be written in another "
            f"model's format. `miles tito check --family {name} --tokenizer {tokenizer.where}` tells; without "
            "session.family the family that claims the checkpoint is taken."
        )
    return family


def claimed_family(
    tokenizer: ChatTokenizer, registry: Registry, *, named: str | None = None, warn: Callable[[str], None]
) -> TitoFamily:
    """The family called `named`, else the installed one that claims the checkpoint; with default options.

    Args:
        warn: Told when no family claims the checkpoint and the best-effort one is taken.

    Raises:
        ConfigError: see `session.factory.choose_family`.
    """
    usable = [entry for entry in registry.entries("tito_family") if entry.state is State.OK]
    installed = {entry.name: load_target(entry.capability.load) for entry in usable}
    name, warning = choose_family(tokenizer, installed, named=named)
    if warning:
        warn(warning)
    target = registry.get("tito_family", name).capability.options
    family: TitoFamily = installed[name](load_target(target)() if target else None, tokenizer)
    return family


def family_name(family: TitoFamily, registry: Registry) -> str:
    """The name by which a run-file picks the family."""
    kind = type(family)
    for entry in registry.entries("tito_family"):
        load = entry.capability.load
        if entry.state is State.OK and load.endswith(f":{kind.__name__}") and load_target(load) is kind:
            return entry.name
    return kind.__name__
