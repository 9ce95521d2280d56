"""Ledger: knows the state of every group that was ever started, so that none is lost silently or trained twice.

    GENERATING ──> FINISHED ──> QUEUED ──> TAKEN ──> TRAINED
        │             │            │         │
        │             ├> FAILED    └> STALE  └> QUEUED (put back)
        └> CUT        └> FILTERED

Each group is in exactly one state, so the counts add up whenever they are looked at:

    submitted = generating + finished + queued + taken + trained + failed + filtered + stale + cut
    submitted = drawn + resubmitted           (a prompt is drawn once, and again for each time it was put back)
    put_back  = resubmitted + waiting_again

A transition that the diagram does not have is an error, and so is a figure that another part counts differently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import Any

from miles_core.errors import ContractError


class Fate(StrEnum):
    """The state of a group."""

    GENERATING = "generating"
    FINISHED = "finished"  # complete; judged next, or waiting for room in the buffer
    QUEUED = "queued"
    TAKEN = "taken"  # in the batch of the step in progress
    TRAINED = "trained"
    FAILED = "failed"  # no trajectory of it can be trained
    FILTERED = "filtered"
    STALE = "stale"
    CUT = "cut"  # stopped while it was generated, by the end of the run


TRANSITIONS: dict[Fate, frozenset[Fate]] = {
    Fate.GENERATING: frozenset({Fate.FINISHED, Fate.CUT}),
    Fate.FINISHED: frozenset({Fate.QUEUED, Fate.FAILED, Fate.FILTERED, Fate.STALE}),
    Fate.QUEUED: frozenset({Fate.TAKEN, Fate.STALE}),
    Fate.TAKEN: frozenset({Fate.TRAINED, Fate.QUEUED}),
    Fate.TRAINED: frozenset(),
    Fate.FAILED: frozenset(),
    Fate.FILTERED: frozenset(),
    Fate.STALE: frozenset(),
    Fate.CUT: frozenset(),
}
ENDS = frozenset(fate for fate, following in TRANSITIONS.items() if not following)


class Ledger:
    """The states of all groups of a run, across restarts. Groups that ended are only counted."""

    def __init__(self) -> None:
        self._pending: dict[int, Fate] = {}
        self._ended: Counter[Fate] = Counter()
        self._reasons: Counter[str] = Counter()
        self._next = 0
        self._resubmitted = 0
        self._put_back = 0

    # --- what happens -------------------------------------------------------------------------------------------------

    def submit(self, *, again: bool) -> int:
        """Start a group, and return its number; `again` says that its prompt had been put back."""
        number = self._next
        self._next += 1
        self._resubmitted += again
        self._pending[number] = Fate.GENERATING
        return number

    def move(self, number: int, fate: Fate, *, reason: str | None = None) -> None:
        """Let group `number` go to `fate`; `reason` says why it was filtered.

        Raises:
            ContractError: that is no transition from its present state; it would be trained twice, or lost.
        """
        before = self._pending.get(number)
        if before is None or fate not in TRANSITIONS[before]:
            raise ContractError(
                f"ledger: group {number} cannot become {fate}",
                expected="one of " + ", ".join(sorted(TRANSITIONS[before])) if before else "a pending group",
                found=before or ("it has ended already" if number < self._next else "no such group"),
                do="report the data buffer: each group goes in once and comes out once",
            )
        if fate in ENDS:
            del self._pending[number]
            self._ended[fate] += 1
            if reason is not None:
                self._reasons[reason] += 1
        else:
            self._pending[number] = fate

    def put_back(self) -> None:
        """A prompt will be submitted again."""
        self._put_back += 1

    # --- what can be read ---------------------------------------------------------------------------------------------

    def numbers(self, fate: Fate) -> set[int]:
        """Numbers of the pending groups in that state."""
        return {number for number, found in self._pending.items() if found is fate}

    @property
    def counts(self) -> dict[str, int]:
        """All figures of the equations above, and `pending`."""
        pending = Counter(self._pending.values())
        by_fate = {fate.value: self._ended[fate] + pending[fate] for fate in Fate}
        return {
            "submitted": self._next,
            **by_fate,
            "pending": len(self._pending),
            "resubmitted": self._resubmitted,
            "put_back": self._put_back,
            "drawn": self._next - self._resubmitted,
        }

    @property
    def reasons(self) -> Mapping[str, int]:
        """Groups filtered so far, by reason."""
        return dict(self._reasons)

    def check(self, *, generating: Collection[int], queued: int, waiting_again: int, drawn: int) -> None:
        """Compare the ledger with what the other parts say.

        Args:
            generating: Groups that the producer has tasks for: they generate, or wait for room in the buffer.
            queued: How many groups the buffer says it holds.
            waiting_again: How many prompts were put back and not submitted again yet.
            drawn: How many prompts the stream has handed out.

        Raises:
            ContractError: naming every figure that differs.
        """
        counts = self.counts
        running = self.numbers(Fate.GENERATING) | self.numbers(Fate.FINISHED)
        total = sum(counts[fate.value] for fate in Fate)
        problems = []
        if total != counts["submitted"]:
            problems.append(f"{counts['submitted']} submitted, {total} accounted for")
        if set(generating) != running:
            problems.append(f"the worker runs {sorted(generating)}, the books say {sorted(running)}")
        if queued != counts["queued"]:
            problems.append(f"the buffer holds {queued} groups, the books say {counts['queued']}")
        if counts["put_back"] != counts["resubmitted"] + waiting_again:
            problems.append(
                f"{counts['put_back']} prompts were put back, {counts['resubmitted']} submitted again, "
                f"{waiting_again} wait"
            )
        if counts["drawn"] != drawn:
            problems.append(f"{drawn} prompts were drawn, {counts['drawn']} submitted")
        if problems:
            raise ContractError("ledger: the counts do not add up", found="; ".join(problems))

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """JSON-compatible."""
        return {
            "next": self._next,
            "resubmitted": self._resubmitted,
            "put_back": self._put_back,
            "pending": {str(number): fate.value for number, fate in sorted(self._pending.items())},
            "ended": {fate.value: count for fate, count in sorted(self._ended.items())},
            "reasons": dict(sorted(self._reasons.items())),
        }

    def restore(self, state: Mapping[str, Any], *, queued: Iterable[int]) -> None:
        """Continue from a saved state. Of its pending groups only those in `queued` still exist; the rest were cut."""
        kept = set(queued)
        self._next, self._resubmitted, self._put_back = (state[key] for key in ("next", "resubmitted", "put_back"))
        self._ended = Counter({Fate(name): count for name, count in state["ended"].items()})
        self._reasons = Counter(state["reasons"])
        self._pending = {}
        for text in state["pending"]:
            if int(text) in kept:
                self._pending[int(text)] = Fate.FINISHED  # the buffer takes it in again
            else:
                self._ended[Fate.CUT] += 1
