"""Which query tokens of a step attend to which stored keys, and the tiles that cover them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one sequence, all of them queries of this step."""

    first_token: int
    """Place of the first query among the step's tokens."""
    count: int
    start: int
    """Position of the first query in its sequence."""
    kv_row: int
    """Row of the sequence's position 0 in the key-value storage; later positions follow."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Spans cut into pieces of at most some number of queries; one entry a piece, fields as in `Span`."""

    first_token: Ints
    count: Ints
    start: Ints
    kv_row: Ints


@dataclass(slots=True)
class Spans:
    """All spans of a step; the layers of a model share it, and its tiles are computed once."""

    spans: Sequence[Span]
    _tiles: dict[int, Tiles] = field(default_factory=dict)
    _tables: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict)
    _fixed: tuple[int, Tensor] | None = None

    @classmethod
    def from_table(cls, most_queries: int, table: Tensor) -> Spans:
        """Spans that exist on a device only, where a recorded graph reads them.

        Args:
            most_queries: No span has more; a tile of at least as many holds a whole span.
            table: i64[4, spans], as `table` returns it.
        """
        spans = cls(())
        spans._fixed = (most_queries, table)
        return spans

    def tiles(self, queries: int) -> Tiles:
        """Pieces of at most `queries` tokens, in order; every token of every span is in exactly one."""
        if queries not in self._tiles:
            spans = np.array([(s.first_token, s.count, s.start, s.kv_row) for s in self.spans], dtype=np.int64)
            spans = spans.reshape(-1, 4)
            pieces = -(-spans[:, 1] // queries)
            owner = np.repeat(np.arange(len(spans)), pieces)
            offset = (np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * queries
            first, count, start, row = spans[owner].T
            self._tiles[queries] = Tiles(first + offset, np.minimum(count - offset, queries), start + offset, row)
        return self._tiles[queries]

    def table(self, queries: int, device: torch.device) -> Tensor:
        """i64[4, tiles] on a device: first token, count, start and key-value row of each piece."""
        if self._fixed is not None:
            assert queries >= self._fixed[0]
            return self._fixed[1]
        key = (queries, device)
        if key not in self._tables:
            t = self.tiles(queries)
            self._tables[key] = torch.from_numpy(np.stack([t.first_token, t.count, t.start, t.kv_row])).to(device)
        return self._tables[key]
