"""The scheduler against a simulated model that remembers which tokens each slot holds."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.kinds.engine import GenerateRequest
from miles_core.types import SamplingParams
from miles_local.attention import group_rows
from miles_local.prefix import PrefixCache
from miles_local.scheduler import CopySlot, LoadSlot, Plan, Row, SaveSlot, Scheduler


def make_row(order: int, prompt: list[int], limit: int) -> Row:
    request = GenerateRequest(
        request_id=str(order), session_id=str(order), token_ids=tuple(prompt), params=SamplingParams()
    )
    return Row(request, order, str(order), list(prompt), limit)


@dataclass
class Machine:
    """Carries out plans on token ids instead of tensors, and checks that every position is what the row says."""

    slots: dict[int, list[int]] = field(default_factory=dict)
    saved: dict[int, list[int]] = field(default_factory=dict)
    computed: int = 0

    def run(self, plan: Plan) -> None:
        for move in plan.moves:
            match move:
                case CopySlot(source, target, tokens):
                    assert len(self.slots[source]) >= tokens, "copies tokens that are not there"
                    self.slots[target] = self.slots[source][:tokens]
                case SaveSlot(slot, tokens, entry):
                    assert self.slots[slot][:tokens] == entry.token_ids
                    self.saved[id(entry)] = list(entry.token_ids)
                case LoadSlot(entry, slot, tokens):
                    self.slots[slot] = self.saved[id(entry)][:tokens]
            assert all(slot < plan.slots for slot in move.slots)
            assert move.tokens <= plan.capacity
        for token, position, slot in zip(plan.token_ids, plan.positions, plan.token_slots, strict=True):
            held = self.slots.setdefault(slot, [])
            del held[position:]
            assert len(held) == position, "a token was computed before the one in front of it"
            held.append(token)
        self.computed += len(plan.token_ids)
        self._check_parts(plan)

    def _check_parts(self, plan: Plan) -> None:
        covered = [0] * len(plan.token_ids)
        for group in plan.decode:
            for i, length in enumerate(group.lengths):
                token, slot = group.first_token + i, group.first_slot + i
                assert (plan.token_slots[token], plan.positions[token]) == (slot, length - 1)
                covered[token] += 1
        for part in plan.prefill:
            for i in range(part.count):
                token = part.first_token + i
                assert (plan.token_slots[token], plan.positions[token]) == (part.slot, part.start + i)
                covered[token] += 1
        assert covered == [1] * len(plan.token_ids), "a token attends not exactly once"
        for row, token in zip(plan.rows, plan.sampled, strict=True):
            assert plan.positions[token] == len(row.ids) - 1, "samples before the row's last token"
            assert self.slots[plan.token_slots[token]] == row.ids, "the slot holds another row"


@settings(max_examples=80, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 5), st.integers(2, 40), st.integers(20, 200), st.booleans())
def test_every_row_is_served_its_own_tokens_through_aborts_flushes_and_preemption(
    chance: random.Random, batch: int, prefill: int, kv_tokens: int, prefixes: bool
) -> None:
    scheduler = Scheduler(batch, kv_tokens, prefill, PrefixCache(60) if prefixes else None)
    machine = Machine()
    trunk = list(range(100, 140))
    rows: list[Row] = []
    unfinished = 0
    for _step in range(400):
        if len(rows) < 15 and chance.random() < 0.4:
            prompt = trunk[: chance.randint(0, 30)] + [chance.randint(0, 5) for _ in range(chance.randint(1, 12))]
            rows.append(make_row(len(rows), prompt, len(prompt) + chance.randint(1, 15)))
            scheduler.add(rows[-1])
            unfinished += 1
        if unfinished and chance.random() < 0.03:
            scheduler.close(chance.choice(list(scheduler.rows())), keep_prefix=False)
            unfinished -= 1
        if chance.random() < 0.03:
            scheduler.flush()
            machine.slots.clear()
        plan = scheduler.plan()
        assert (plan is None) == (unfinished == 0)
        if plan is None:
            if len(rows) == 15:
                break
            continue
        assert len(scheduler.running) <= batch
        assert sum(part.count for part in plan.prefill) <= prefill
        machine.run(plan)
        scheduler.advance(plan)
        for row in plan.rows:
            row.ids.append(chance.randint(0, 5))
            if len(row.ids) == row.limit:
                scheduler.close(row, keep_prefix=True)
                unfinished -= 1
    else:
        raise AssertionError("some row is never finished")
    assert all(row.closed for row in rows)


def serve(scheduler: Scheduler, machine: Machine) -> int:
    steps = 0
    while (plan := scheduler.plan()) is not None:
        machine.run(plan)
        scheduler.advance(plan)
        for row in plan.rows:
            row.ids.append(7)
            if len(row.ids) == row.limit:
                scheduler.close(row, keep_prefix=True)
        steps += 1
    return steps


def test_a_groups_prompt_is_computed_once() -> None:
    scheduler, machine = Scheduler(8, 10_000, 1000, PrefixCache(1000)), Machine()
    for order in range(8):
        scheduler.add(make_row(order, list(range(50)), 53))
    assert serve(scheduler, machine) == 4, "the followers start one step after the leader"
    # 50 for the leader, the last prompt token again for each of the 7 others, and two more inputs for each row.
    assert machine.computed == 50 + 7 + 8 * 2


def test_without_the_cache_every_prompt_is_computed() -> None:
    scheduler, machine = Scheduler(8, 10_000, 1000, None), Machine()
    for order in range(8):
        scheduler.add(make_row(order, list(range(50)), 53))
    assert serve(scheduler, machine) == 3
    assert machine.computed == 8 * 52


def test_a_finished_slot_is_refilled_in_the_next_step() -> None:
    scheduler, machine = Scheduler(2, 10_000, 1000, None), Machine()
    for order, length in enumerate((2, 9, 5)):
        scheduler.add(make_row(order, [order] * 4, 4 + length))
    for running in ([0, 1], [0, 1], [1, 2]):
        plan = scheduler.plan()
        assert plan is not None
        assert sorted(row.order for row in scheduler.running) == running
        machine.run(plan)
        scheduler.advance(plan)
        for row in plan.rows:
            row.ids.append(7)
            if len(row.ids) == row.limit:
                scheduler.close(row, keep_prefix=True)


def test_a_session_computes_only_what_it_appended() -> None:
    scheduler, machine = Scheduler(2, 10_000, 1000, PrefixCache(1000)), Machine()
    first = make_row(0, list(range(30)), 35)
    scheduler.add(first)
    serve(scheduler, machine)
    before = machine.computed
    scheduler.add(make_row(1, [*first.ids, 1, 2, 3], 39))
    serve(scheduler, machine)
    # The last sampled token was never an input; it and the three appended ones are.
    assert machine.computed - before == 4


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 2000)), max_size=40))
def test_groups_tile_the_rows_and_join_neighbours_only(rows: list[tuple[bool, int]]) -> None:
    slots: list[int] = []
    for gap, _ in rows:
        slots.append((slots[-1] + 1 + gap) if slots else 0)
    ranges = group_rows(slots, [length for _, length in rows])
    assert [i for first, last in ranges for i in range(first, last)] == list(range(len(rows)))
    for first, last in ranges:
        assert slots[last - 1] - slots[first] == last - 1 - first


def test_rows_of_equal_length_share_one_group_and_very_unequal_ones_do_not() -> None:
    assert group_rows(list(range(32)), [300] * 32) == [(0, 32)]
    assert group_rows([0, 1, 2, 3], [4000, 50, 60, 55]) == [(0, 1), (1, 4)]
