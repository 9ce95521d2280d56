"""The ledger: every group in one state, every transition that should not be refused by name."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.errors import ContractError
from miles_core.rollout.ledger import ENDS, TRANSITIONS, Fate, Ledger


def at(fate: Fate) -> Ledger:
    """A ledger with group 0 in a state."""
    paths: dict[Fate, tuple[Fate, ...]] = {Fate.GENERATING: ()}
    while fate not in paths:
        for start, path in list(paths.items()):
            for end in TRANSITIONS[start]:
                paths.setdefault(end, (*path, end))
    ledger = Ledger()
    ledger.submit(again=False)
    for step in paths[fate]:
        ledger.move(0, step)
    return ledger


@pytest.mark.parametrize(("start", "end"), list(itertools.product(Fate, Fate)))
def test_the_machine_takes_every_edge_of_its_table_and_no_other(start: Fate, end: Fate) -> None:
    ledger = at(start)
    if end in TRANSITIONS[start]:
        ledger.move(0, end)
        assert ledger.counts[end] == 1
    else:
        with pytest.raises(ContractError, match="group 0 cannot become"):
            ledger.move(0, end)


def test_a_group_is_trained_once() -> None:
    ledger = at(Fate.TRAINED)
    with pytest.raises(ContractError, match="ended already"):
        ledger.move(0, Fate.TRAINED)
    with pytest.raises(ContractError, match="no such group"):
        ledger.move(1, Fate.TRAINED)


@given(st.data())
def test_counts_add_up_on_every_walk_and_over_every_restart(data: Any) -> None:
    ledger = Ledger()
    waiting = 0
    for _ in range(data.draw(st.integers(0, 30))):
        pending = sorted(number for fate in Fate for number in ledger.numbers(fate))
        choice = data.draw(st.sampled_from(["submit", "move", "restart"]))
        if choice == "submit" or not pending:
            again = waiting > 0 and data.draw(st.booleans())
            ledger.submit(again=again)
            waiting -= again
        elif choice == "move":
            number = data.draw(st.sampled_from(pending))
            now = next(fate for fate in Fate if number in ledger.numbers(fate))
            fate = data.draw(st.sampled_from(sorted(TRANSITIONS[now])))
            ledger.move(number, fate, reason="why" if fate is Fate.FILTERED else None)
            if fate in (Fate.STALE, Fate.FAILED) and data.draw(st.booleans()):
                ledger.put_back()
                waiting += 1
        else:
            kept = sorted(ledger.numbers(Fate.QUEUED) | ledger.numbers(Fate.FINISHED))
            saved = json.loads(json.dumps(ledger.state()))
            ledger = Ledger()
            ledger.restore(saved, queued=kept)
            assert ledger.numbers(Fate.FINISHED) == set(kept)
        counts = ledger.counts
        assert counts["submitted"] == sum(counts[fate] for fate in Fate)
        assert counts["pending"] == sum(counts[fate] for fate in Fate if fate not in ENDS)
        assert sum(ledger.reasons.values()) == counts["filtered"]
        running = ledger.numbers(Fate.GENERATING) | ledger.numbers(Fate.FINISHED)
        ledger.check(generating=running, queued=counts["queued"], waiting_again=waiting, drawn=counts["drawn"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"generating": {0, 5}}, r"the worker runs \[0, 5\], the books say \[0\]"),
        ({"queued": 1}, "the buffer holds 1 groups"),
        ({"waiting_again": 1}, "0 prompts were put back"),
        ({"drawn": 2}, "2 prompts were drawn, 1 submitted"),
    ],
)
def test_what_another_part_holds_differently_is_named(change: dict[str, Any], words: str) -> None:
    ledger = at(Fate.GENERATING)
    facts: dict[str, Any] = {"generating": {0}, "queued": 0, "waiting_again": 0, "drawn": 1}
    ledger.check(**facts)
    with pytest.raises(ContractError, match=words):
        ledger.check(**(facts | change))
