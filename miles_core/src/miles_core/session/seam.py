"""Where a stored row meets what is appended to it: the one place at which a token family may repair anything.

Only the end of the row is shown to the family, so the work of a turn does not grow with the history, and a family
cannot touch what was rendered or sampled before.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from miles_core.errors import SessionError
from miles_core.kinds.tito_family import SEAM, TitoFamily


class Seam(NamedTuple):
    """How a row goes on."""

    kept: int
    """Leading tokens of the row that stay: all, or all but a last stop token that the next opener replaces."""
    fresh: list[int]
    """Ids after them."""


def join(family: TitoFamily, row: array[int], suffix: Sequence[int], *, where: str) -> Seam:
    """The family's `merge` of `row` and `suffix`, checked.

    Raises:
        SessionError: the row ends within a turn, or the family changed tokens that are history already.
    """
    start = max(0, len(row) - SEAM)
    tail = row[start:].tolist()
    merged = family.merge(tail, suffix)
    size = len(tail)
    if merged[:size] == tail:
        return Seam(len(row), merged[size:])
    short = size - 1
    if tail and tail[-1] in family.stop_token_ids and merged[:short] == tail[:short]:
        return Seam(len(row) - 1, merged[short:])
    pairs = enumerate(zip(tail, merged, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(size, len(merged)))
    near = slice(max(0, at - 2), at + 6)
    raise SessionError(
        "the token family changed tokens that were already rendered or sampled",
        expected=f"{tail[near]} from token {start + max(0, at - 2)}",
        found=f"{merged[near]}",
        where=f"family {type(family).__name__}, {where}",
        do="report it to the family's author; its `merge` may only touch the seam",
    )
