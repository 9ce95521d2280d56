"""Who writes to whom.

The first min(S, T) pairs are one to one; the rest is spread evenly, so that no source holds more sessions than it must.
Among sources with room, one that already serves the same rank of another engine comes first: both want the same layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True, slots=True, order=True)
class Target:
    """One rank of one engine."""

    engine: int
    rank: int = 0


def assign(sources: int, targets: Sequence[Target]) -> tuple[tuple[Target, ...], ...]:
    """Targets of each source, in the order in which it serves them: those of one layout together.

    Args:
        sources: Trainer ranks that hold complete tensors; at least one.
        targets: Every engine rank once, engine by engine.

    Raises:
        ValueError: no source, or a target twice.
    """
    if sources < 1:
        raise ValueError("there is no source to write from")
    if len(set(targets)) != len(targets):
        raise ValueError("a target is listed twice")
    limit = ceil(len(targets) / sources)
    served: list[list[Target]] = [[] for _ in range(sources)]
    alike: dict[int, list[int]] = {}  # sources that serve a rank already
    for index, target in enumerate(targets):
        if index < sources:
            source = index
        else:
            free = [each for each in alike.get(target.rank, ()) if len(served[each]) < limit]
            source = min(free or range(sources), key=lambda each: len(served[each]))
        served[source].append(target)
        if source not in alike.setdefault(target.rank, []):
            alike[target.rank].append(source)
    return tuple(tuple(sorted(each, key=lambda target: (target.rank, target.engine))) for each in served)
