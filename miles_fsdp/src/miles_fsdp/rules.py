"""What the options must satisfy, checked before anything starts."""

from __future__ import annotations

from collections.abc import Iterable

from miles_core.rules import Facts, Finding


def replicas_divide(facts: Facts) -> Iterable[Finding]:
    """Every replica is sharded over equally many ranks."""
    ranks, replicas = (facts.values.get(path, 1) for path in ("placement.trainer_ranks", "backend.dp_replicate"))
    if ranks % replicas:
        yield Finding(path="backend.dp_replicate", found=f"{replicas} replicas over {ranks} trainer ranks")
