"""First-party capabilities by name, so that an uninstalled one is met with where it is instead of "unknown"."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Home:
    """Where a capability lives."""

    distribution: str
    folder: str
    """In the Miles repository. Until the distributions are published, a bare name must never be given to pip."""


_FSDP = Home("miles-fsdp", "miles_fsdp")
_LOCAL = Home("miles-local", "plugins/miles-local")
_TRANSPORTS = Home("miles-transports", "miles_transports")
_RAY = Home("miles-ray", "plugins/miles-ray")
_CHATML = Home("miles-tito-chatml", "plugins/miles-tito-chatml")
_REASONING_GYM = Home("miles-env-reasoning-gym", "plugins/miles-env-reasoning-gym")
_WANDB = Home("miles-wandb", "plugins/miles-wandb")

KNOWN: dict[tuple[str, str], Home] = {
    ("backend", "fsdp"): _FSDP,
    ("engine", "local"): _LOCAL,
    ("transport", "inprocess"): _TRANSPORTS,
    ("transport", "broadcast"): _TRANSPORTS,
    ("executor", "ray"): _RAY,
    ("tito_family", "chatml"): _CHATML,
    ("environment", "reasoning-gym"): _REASONING_GYM,
    ("reward", "reasoning-gym"): _REASONING_GYM,
    ("tracker", "wandb"): _WANDB,
}

FIRST_PARTY = frozenset({"miles-core", *(place.distribution for place in KNOWN.values())})
"""Distributions of the Miles repository."""


def home(kind: str, name: str) -> Home | None:
    """Where a first-party capability outside core lives, or None when no such one is known."""
    return KNOWN.get((kind, name))
