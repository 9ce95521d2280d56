"""Prefixes: which stored key-values a new request can start from.

A prefix belongs to one weight version; activating another empties the cache, so an entry can never be continued by
weights that did not make it. Pure bookkeeping: the tensors live with the model and fill in `PrefixEntry.saved` there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles_core.routing.codec import Routes

if TYPE_CHECKING:
    from miles_local.kv import SavedKV

MIN_SHARED = 8
"""Shorter common prefixes are computed again: a copy and a step of waiting cost as much."""


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix of two lists; by halving, since comparing slices runs at C speed."""
    longest = min(len(left), len(right))
    if left[:longest] == right[:longest]:
        return longest
    low, high = 0, longest  # equal up to low, different within high
    while low + 1 < high:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


@dataclass(slots=True, eq=False)
class PrefixEntry:
    """Key-values of a finished request."""

    session_id: str
    token_ids: list[int]
    saved: SavedKV | None = None
    """Filled in when the model's thread has copied them; any step that loads the entry runs after that."""
    routes: Routes | None = None
    """Experts that made them: [tokens, L, K], or None where none are recorded."""


class PrefixCache:
    """Finished requests by age, bounded in tokens."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.tokens = 0
        self._entries: OrderedDict[int, PrefixEntry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, session_id: str, token_ids: list[int]) -> PrefixEntry | None:
        """Make an entry, or None when it is longer than the whole cache. It replaces what it extends in its own
        session."""
        if len(token_ids) > self.max_tokens or len(token_ids) < MIN_SHARED:
            return None
        for entry in list(self._entries.values()):
            same = entry.session_id == session_id
            if same and common_prefix(entry.token_ids, token_ids) == len(entry.token_ids):
                self._remove(entry)
        entry = PrefixEntry(session_id, token_ids)
        self._entries[id(entry)] = entry
        self.tokens += len(token_ids)
        while self.tokens > self.max_tokens:
            self._remove(next(iter(self._entries.values())))
        return entry

    def find(self, token_ids: list[int]) -> tuple[PrefixEntry | None, int]:
        """The entry that shares the longest prefix with `token_ids`, and its length; marks it used."""
        best: PrefixEntry | None = None
        longest = MIN_SHARED - 1
        for entry in self._entries.values():
            # The cheap look first: an entry must agree up to one token beyond the best so far.
            if entry.token_ids[: longest + 1] == token_ids[: longest + 1]:
                shared = common_prefix(entry.token_ids, token_ids)
                if shared > longest:
                    best, longest = entry, shared
        if best is None:
            return None, 0
        self._entries.move_to_end(id(best))
        return best, longest

    def clear(self) -> None:
        self._entries.clear()
        self.tokens = 0

    def _remove(self, entry: PrefixEntry) -> None:
        del self._entries[id(entry)]
        self.tokens -= len(entry.token_ids)
