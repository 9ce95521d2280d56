"""Which leaves of a branching session become rows of the trajectory, and which row trains a turn that several contain.

A picker gets all leaves, in the order in which they were committed, and returns those to keep. Every sampled turn is
then trained in the earliest kept leaf whose path contains it, and only there, so that no token is trained twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from miles_core.errors import PluginError
from miles_core.session.matching import matcher_name
from miles_core.session.tree import Node, TreeSession
from miles_core.user_function import in_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """What a picker sees of a leaf."""

    node: int
    """The number of the leaf; turns are numbered in the order in which they were committed."""
    path: tuple[int, ...]
    """The numbers of the nodes, from root to leaf."""
    tokens: int
    """Length of the whole row."""
    sampled: int
    """How many tokens were sampled in the leaf's own turn."""
    retried: bool
    """Whether a later turn has the same parent: the agent asked again. Roots do not count as asked again."""


Picker = Callable[[Sequence[Leaf]], Sequence[Leaf]]


def keep_all(leaves: Sequence[Leaf]) -> Sequence[Leaf]:
    """Every leaf."""
    return leaves


def drop_retries(leaves: Sequence[Leaf]) -> Sequence[Leaf]:
    """All but those that the agent asked for again: it did not mean the first answer to count."""
    return [leaf for leaf in leaves if not leaf.retried]


def longest(leaves: Sequence[Leaf]) -> Sequence[Leaf]:
    """The leaf with the most tokens; the earliest if several have as many."""
    return [max(leaves, key=lambda leaf: (leaf.tokens, -leaf.node))] if leaves else []


PICKERS: Mapping[str, Picker] = {"all": keep_all, "drop-retries": drop_retries, "longest": longest}


def all_leaves(session: TreeSession) -> list[Leaf]:
    """The session's leaves, in order of commits."""
    found = []
    for node in session.leaves:
        path = tuple(each.number for each in session.path(node.number))
        found.append(
            Leaf(
                node=node.number,
                path=path,
                tokens=node.row_end,
                sampled=node.sampled,
                retried=_superseded(session, node),
            )
        )
    return found


def pick(session: TreeSession, picker: Picker) -> list[Leaf]:
    """The leaves that `picker` keeps, in order of commits.

    Raises:
        PluginError: the picker raised, or returned something else than a choice among what it was given.
    """
    leaves = all_leaves(session)
    name = matcher_name(picker)
    try:
        chosen = list(picker(tuple(leaves)))
    except Exception as error:
        # Foreign code: whatever it raises is its own failure, and the session's turns are still there.
        raise PluginError(f"the leaf picker {name} raised {in_words(error)}") from error
    known = {id(leaf) for leaf in leaves}
    if len({id(leaf) for leaf in chosen}) != len(chosen) or not all(id(leaf) in known for leaf in chosen):
        raise PluginError(
            f"the leaf picker {name} did not choose among its leaves",
            expected="some of the leaves it was given, each at most once",
            found=f"{chosen!r:.200}",
        )
    return sorted(chosen, key=lambda leaf: leaf.node)


def owners(kept: Sequence[Leaf]) -> dict[int, int]:
    """For each node, the kept leaf that trains its turn: the earliest whose path contains it."""
    found: dict[int, int] = {}
    for leaf in sorted(kept, key=lambda each: each.node):
        for node in leaf.path:
            found.setdefault(node, leaf.node)
    return found


def _superseded(session: TreeSession, node: Node) -> bool:
    return node.parent >= 0 and session.nodes[node.parent].children[-1] != node.number
