"""Picks to resolved capabilities: the typed result of validation, which plan and driver trust."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from miles_core.capability import Capability
from miles_core.config.spec import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """One pick, resolved: the capability, who brings it, and its validated options (None when it takes none)."""

    kind: str
    capability: Capability
    distribution: str
    version: str
    options: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRun:
    """A run-file that passed validation. Kinds with one pick are in `one`, kinds with several in `many`."""

    spec: RunSpec
    one: dict[str, Resolved]
    many: dict[str, tuple[Resolved, ...]]
