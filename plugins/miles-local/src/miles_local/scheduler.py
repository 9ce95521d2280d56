"""Which requests run, in which slots, and what the next step computes. Pure bookkeeping: no tensor is touched here.

    waiting ──admit──> running ──finish/abort──> gone
       ^                  │
       └──────requeue─────┘   (new weights, or too little key-value memory)

A request is a row of ids and the number of them whose key-values are stored. Prefill, decoding, recomputation under new
weights and continuing after preemption are one thing: compute the ids not stored yet, and sample when none is left.
Order is arrival order throughout, so that equal arrivals give equal steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from miles_core.kinds.engine import GenerateRequest
from miles_core.routing.codec import Routes
from miles_local.attention import DecodeGroup, PrefillPart, group_rows
from miles_local.prefix import MIN_SHARED, PrefixCache, PrefixEntry, common_prefix
from miles_local.routes import RowRoutes
from miles_local.sampling import Draw, uniform


@dataclass(slots=True, eq=False)
class Row:
    """One request in the engine."""

    request: GenerateRequest
    order: int
    """Arrival number; older rows come first."""
    seed: str
    ids: list[int]
    """Prompt and sampled tokens."""
    limit: int
    """Length of `ids` at which the request is done."""
    stored: int = 0
    """Leading ids whose key-values are in the row's slot."""
    slot: int | None = None
    cached: int | None = None
    """Prompt tokens reused at first admission."""
    mixed: bool = False
    """Its key-values are of older weights than those served: nobody else may use them."""
    closed: bool = False
    routes: RowRoutes = field(default_factory=RowRoutes)
    """Stays empty where the engine records none."""

    @property
    def pending(self) -> int:
        return len(self.ids) - self.stored


@dataclass(frozen=True, slots=True)
class CopySlot:
    source: int
    target: int
    tokens: int

    @property
    def slots(self) -> tuple[int, ...]:
        return self.source, self.target


@dataclass(frozen=True, slots=True)
class SaveSlot:
    slot: int
    tokens: int
    entry: PrefixEntry

    @property
    def slots(self) -> tuple[int, ...]:
        return (self.slot,)


@dataclass(frozen=True, slots=True)
class LoadSlot:
    entry: PrefixEntry
    slot: int
    tokens: int

    @property
    def slots(self) -> tuple[int, ...]:
        return (self.slot,)


Move = CopySlot | SaveSlot | LoadSlot


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: copies in order, then one forward pass, then a draw for every row whose ids are all stored."""

    moves: tuple[Move, ...]
    slots: int
    """Slots that running rows and moves touch."""
    capacity: int
    """Tokens of the longest row or move."""
    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    token_slots: tuple[int, ...]
    decode: tuple[DecodeGroup, ...]
    prefill: tuple[PrefillPart, ...]
    sampled: tuple[int, ...]
    """Token of the step after which each draw samples."""
    draws: tuple[Draw, ...]
    rows: tuple[Row, ...]
    """The row of each draw."""
    progress: tuple[tuple[Row, int], ...]
    """How many ids of which row are stored afterwards."""


@dataclass(slots=True)
class Scheduler:
    """Waiting and running rows."""

    max_batch_size: int
    kv_tokens: int
    prefill_tokens: int
    prefixes: PrefixCache | None
    """None switches all reuse off."""
    waiting: list[Row] = field(default_factory=list)
    slots: list[Row | None] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)

    @property
    def running(self) -> list[Row]:
        return [row for row in self.slots if row is not None]

    @property
    def busy(self) -> bool:
        return bool(self.waiting) or any(row is not None for row in self.slots)

    def rows(self) -> Iterator[Row]:
        yield from self.running
        yield from self.waiting

    def add(self, row: Row) -> None:
        self.waiting.append(row)

    def close(self, row: Row, *, keep_prefix: bool) -> None:
        """Take a finished or aborted row out; its slot is free at once."""
        row.closed = True
        if row.slot is None:
            self.waiting.remove(row)
            return
        if keep_prefix and self.prefixes is not None:
            entry = None if row.mixed else self.prefixes.add(row.request.session_id, row.ids[: row.stored])
            if entry is not None:
                entry.routes = row.routes.stored(row.stored)
                self.moves.append(SaveSlot(row.slot, row.stored, entry))
        self.slots[row.slot] = None
        row.slot = None

    def flush(self) -> None:
        """Forget all key-values; every running row starts over from its ids, in order of arrival."""
        self.retract()
        self.moves.clear()
        if self.prefixes is not None:
            self.prefixes.clear()

    def retract(self) -> None:
        """Return every running row to the queue; it starts over from its ids, in order of arrival."""
        for row in self.running:
            self._requeue(row)
        self.slots.clear()

    def freeze(self) -> None:
        """Keep the running rows' key-values over a change of weights, for these rows alone."""
        for row in self.running:
            row.mixed = row.mixed or row.stored > 0
        self.moves.clear()  # only copies into the prefix cache are pending between steps
        if self.prefixes is not None:
            self.prefixes.clear()

    def _requeue(self, row: Row) -> None:
        if row.slot is not None:
            self.slots[row.slot] = None
        row.slot, row.stored, row.mixed = None, 0, False
        row.routes.restart()
        self.waiting.append(row)
        self.waiting.sort(key=lambda waiting: waiting.order)

    # --- admission ----------------------------------------------------------------------------------------------------

    def _fits(self, rows: list[Row]) -> bool:
        """Whether key-value memory, padded to the longest row, holds these rows after one more token each."""
        return len(rows) <= 1 or len(rows) * (max(len(row.ids) for row in rows) + 1) <= self.kv_tokens

    def _admit(self) -> None:
        running = self.running
        while not self._fits(running):
            youngest = max(running, key=lambda row: row.order)
            running.remove(youngest)
            self._requeue(youngest)
        budget = self.prefill_tokens - sum(row.pending for row in running if row.pending > 1)
        for row in list(self.waiting):
            if budget <= 0 or len(running) >= self.max_batch_size or not self._fits([*running, row]):
                return
            move, shared = self._best_source(row, running)
            if shared is None:
                continue
            slot = self._free_slot()
            if move is not None:
                self.moves.append(move(slot))
                copied = move.routes
                if copied is not None:
                    row.routes.write(0, copied)
            row.slot, row.stored = slot, shared
            if row.cached is None:
                row.cached = shared
            self.slots[slot] = row
            self.waiting.remove(row)
            running.append(row)
            budget -= row.pending

    def _best_source(self, row: Row, running: list[Row]) -> tuple[_MakeMove | None, int | None]:
        """How to start a row: the copy to make and the tokens it brings. Tokens None: another row is computing the
        prefix right now, waiting one step saves doing it twice."""
        if self.prefixes is None:
            return None, 0
        usable = row.ids[:-1]  # the last id must be computed: its logits are what we want
        entry, shared = self.prefixes.find(usable)
        move = None if entry is None else _MakeMove("load", entry, None, shared)
        coming = 0
        for other in running:
            if other.mixed:
                continue
            common = common_prefix(other.ids, usable)
            ready = min(common, other.stored)
            coming = max(coming, common)
            if ready >= MIN_SHARED and ready > shared and other.slot is not None:
                move, shared = _MakeMove("copy", None, other, ready), ready
        if coming >= shared + MIN_SHARED:
            return None, None
        return move, shared

    def _free_slot(self) -> int:
        for slot, row in enumerate(self.slots):
            if row is None:
                return slot
        self.slots.append(None)
        return len(self.slots) - 1

    def _compact(self) -> None:
        """Close gaps with rows from the end, so that decoding rows are neighbours."""
        while None in self.slots:
            row = self.slots.pop()
            if row is None:
                continue
            hole = self.slots.index(None)
            self.moves.append(CopySlot(len(self.slots), hole, row.stored))
            row.slot, self.slots[hole] = hole, row

    # --- the next step ------------------------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """The next step, or None when nothing runs or waits."""
        self._admit()
        self._compact()
        running = self.running
        if not running:
            return None
        decoding = [row for row in running if row.pending == 1]
        chunks = [(row, 1) for row in decoding]
        budget = self.prefill_tokens
        for row in sorted((row for row in running if row.pending > 1), key=lambda row: row.order):
            count = min(row.pending, budget)
            if count > 0:
                chunks.append((row, count))
                budget -= count
        plan = _assemble(tuple(self.moves), running, decoding, chunks)
        self.moves.clear()
        return plan

    def advance(self, plan: Plan, routes: Routes | None = None) -> None:
        """Record what a step stored.

        Args:
            routes: [N, L, K] experts of the step's tokens, or None where none are recorded.
        """
        first = 0
        for row, stored in plan.progress:
            last = first + stored - row.stored
            if not row.closed:
                if routes is not None:
                    row.routes.write(row.stored, routes[first:last])
                row.stored = stored
            first = last


@dataclass(frozen=True, slots=True)
class _MakeMove:
    """A copy whose target slot is not chosen yet."""

    kind: Literal["load", "copy"]
    entry: PrefixEntry | None
    source: Row | None
    tokens: int

    @property
    def routes(self) -> Routes | None:
        """Of the tokens it brings."""
        if self.entry is not None:
            return None if self.entry.routes is None else self.entry.routes[: self.tokens]
        assert self.source is not None
        return self.source.routes.stored(self.tokens)

    def __call__(self, slot: int) -> Move:
        if self.entry is not None:
            return LoadSlot(self.entry, slot, self.tokens)
        assert self.source is not None
        return CopySlot(_slot(self.source), slot, self.tokens)


def _assemble(moves: tuple[Move, ...], running: list[Row], decoding: list[Row], chunks: list[tuple[Row, int]]) -> Plan:
    ranges = group_rows([_slot(row) for row in decoding], [len(row.ids) for row in decoding])
    token_ids: list[int] = []
    positions: list[int] = []
    token_slots: list[int] = []
    prefill: list[PrefillPart] = []
    sampled: list[int] = []
    rows: list[Row] = []
    for index, (row, count) in enumerate(chunks):
        if index >= len(decoding):
            prefill.append(PrefillPart(len(token_ids), _slot(row), row.stored, count))
        token_ids += row.ids[row.stored : row.stored + count]
        positions += range(row.stored, row.stored + count)
        token_slots += [_slot(row)] * count
        if row.stored + count == len(row.ids):
            sampled.append(len(token_ids) - 1)
            rows.append(row)
    return Plan(
        moves=moves,
        slots=1 + max([_slot(row) for row in running] + [slot for move in moves for slot in move.slots]),
        capacity=max([len(row.ids) for row in running] + [move.tokens for move in moves]),
        token_ids=tuple(token_ids),
        positions=tuple(positions),
        token_slots=tuple(token_slots),
        decode=tuple(
            DecodeGroup(first, _slot(decoding[first]), tuple(len(row.ids) for row in decoding[first:last]))
            for first, last in ranges
        ),
        prefill=tuple(prefill),
        sampled=tuple(sampled),
        draws=tuple(_draw(row) for row in rows),
        rows=tuple(rows),
        progress=tuple((row, row.stored + count) for row, count in chunks),
    )


def _slot(row: Row) -> int:
    assert row.slot is not None
    return row.slot


def _draw(row: Row) -> Draw:
    params = row.request.params
    return Draw(params.temperature, params.top_p, params.top_k, params.min_p, uniform(row.seed, len(row.ids)))
