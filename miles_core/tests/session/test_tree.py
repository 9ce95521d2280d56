"""Branching histories: where a request attaches, what is refused, and that every sampled token is trained once."""

from __future__ import annotations

import asyncio
import random
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.errors import EngineError, PluginError
from miles_core.session import leaves as pickers
from miles_core.session.assembly import assemble_all
from miles_core.session.base import SessionSetup
from miles_core.session.default_family import DefaultFamily
from miles_core.session.generation import Output
from miles_core.session.matching import strict
from miles_core.session.refusals import StaleTurn, TooManyTurns, TurnCut
from miles_core.session.tree import MAX_NODES, TreeSession
from miles_core.testing.virtual_time import in_virtual_time
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import FinishReason, Message, SamplingParams, Status

S = Message(role="system", content="s")
OTHER = Message(role="system", content="t")
U = Message(role="user", content="u")
U2 = Message(role="user", content="v")
T1, T2, T3 = (Message(role="tool", content=text, tool_call_id="c") for text in ("one", "two", "three"))
A1, A2, A3 = (Message(role="assistant", content=text) for text in ("alpha", "beta", "gamma"))


@pytest.fixture
def tree(tokenizer: ChatTokenizer, engine: Any) -> TreeSession:
    return new_tree(tokenizer, engine)


def new_tree(tokenizer: ChatTokenizer, engine: Any, **params: Any) -> TreeSession:
    setup = SessionSetup(
        engine=engine,
        engine_name="engine 0",
        family=DefaultFamily(None, tokenizer),
        matcher=strict,
        params=SamplingParams(**params),
        context_length=4000,
    )
    return TreeSession("t", setup)


async def grow(tree: TreeSession, engine: Any) -> None:
    """n0 = [S, U, A1] <- n1 = [T1, A2] <- n2 = [T2, A3]."""
    engine.replies += ["alpha", "beta", "gamma"]
    history = [S, U]
    for answer, following in ((A1, T1), (A2, T2), (A3, None)):
        completion = await tree.complete(history)
        assert completion.message == answer
        history += [answer, following] if following else [answer]


ATTACH = {
    "all and a new user": ([S, U, A1, T1, A2, T2, A3, U2], 2, 7),
    "exactly all": ([S, U, A1, T1, A2, T2, A3], 2, 7),
    "another last tool result": ([S, U, A1, T1, A2, T3], 1, 5),
    "another first tool result": ([S, U, A1, T3], 0, 3),
    "another user": ([S, U2], -1, 0),
    "a pure prefix of the root's delta": ([S, U], -1, 0),
    "a rewritten answer": ([S, U, A1, T1, A3, U2], 0, 3),
    "another system": ([OTHER, U, A1, T1], -1, 0),
}


@pytest.mark.parametrize("name", ATTACH)
async def test_a_request_attaches_to_the_deepest_turn_whose_whole_path_prefixes_it(
    name: str, tree: TreeSession, engine: Any
) -> None:
    await grow(tree, engine)
    history, node, covered = ATTACH[name]
    assert tree.attach(history) == (node, covered)
    before = tree.row_to(node) if node >= 0 else array("i")
    completion = await tree.complete(history)
    assert (completion.turn, tree.nodes[3].parent) == (3, node)
    assert engine.requests[-1].token_ids[: len(before)] == before.tolist()
    assert len(tree.nodes) == 4, "nothing is deleted"


async def test_of_twins_the_later_one_is_extended(tree: TreeSession, engine: Any) -> None:
    engine.replies += ["alpha", "alpha"]
    await tree.complete([U])
    await tree.complete([U])
    assert tree.attach([U, A1, U2]) == (1, 2)


async def test_of_two_roots_the_deeper_match_wins(tree: TreeSession, engine: Any) -> None:
    engine.replies += ["alpha", "beta"]
    await tree.complete([U])
    await tree.complete([U, Message(role="assistant", content="given"), U2])
    assert tree.attach([U, A1, U2]) == (0, 2)
    assert tree.attach([U, Message(role="assistant", content="given"), U2, A2, U]) == (1, 4)


@in_virtual_time
async def test_turns_generated_at_once_become_siblings_and_sample_differently(
    tree: TreeSession, engine: Any, tokenizer: ChatTokenizer
) -> None:
    tree = new_tree(tokenizer, engine, seed=3)
    engine.replies += ["alpha", "beta", "gamma"]
    await tree.complete([U])
    engine.gate = asyncio.Event()
    both = asyncio.gather(tree.complete([U, A1, T1]), tree.complete([U, A1, T1]))
    await asyncio.sleep(0.01)
    engine.gate.set()
    await both
    assert [node.parent for node in tree.nodes] == [-1, 0, 0]
    seeds = [request.params.seed for request in engine.requests]
    assert len(set(seeds)) == 3


async def test_a_failed_turn_is_repeated_with_its_seed(tokenizer: ChatTokenizer, engine: Any) -> None:
    tree = new_tree(tokenizer, engine, seed=3)
    engine.replies += [EngineError("lost"), "alpha"]
    with pytest.raises(EngineError):
        await tree.complete([U])
    await tree.complete([U])
    assert engine.requests[0].params.seed == engine.requests[1].params.seed


async def test_other_tools_are_another_root(tree: TreeSession, engine: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    engine.replies += ["alpha", "beta"]
    await tree.complete([U])
    await tree.complete([U, A1, U2], [tool])
    assert [node.parent for node in tree.nodes] == [-1, -1]


async def test_a_cut_turn_is_never_extended_but_its_parent_is(tree: TreeSession, engine: Any, make_chunk: Any) -> None:
    ids = tree.family.tokenizer.encode("alpha")
    engine.replies += ["alpha", [make_chunk(ids, finish=FinishReason.LENGTH)], "beta"]
    await tree.complete([U])
    await tree.complete([U, A1, T1])
    with pytest.raises(TurnCut):
        await tree.complete([U, A1, T1, A1, U2])
    await tree.complete([U, A1, T2])
    found = assemble_all(tree, prompt_id="p", picker=pickers.keep_all)
    assert [each.status for each in found] == [Status.TRUNCATED, Status.COMPLETED]


async def test_closing_drops_the_turn_under_way(tree: TreeSession, engine: Any) -> None:
    engine.gate = asyncio.Event()
    task = asyncio.create_task(tree.complete([U]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    tree.close()
    engine.gate.set()
    with pytest.raises(StaleTurn):
        await task
    assert not tree.nodes


def direct(tree: TreeSession, parent: int, fresh: Sequence[Message], text: str) -> int:
    """Commit a turn below `parent` without an engine."""
    tokenizer = tree.family.tokenizer
    before = list(tree.messages_to(parent)) if parent >= 0 else []
    prepared = tree.prepare([*before, *fresh])
    assert prepared.base == parent
    output = Output(finish_reason=FinishReason.STOP)
    output.ids.extend([*tokenizer.encode(text), min(tree.family.stop_token_ids)])
    output.logprobs.extend([-0.5] * len(output.ids))
    output.stretches.append((len(output.ids), 0))
    return tree.commit(prepared, output).turn


def test_a_deep_path_needs_no_recursion_and_the_number_of_turns_is_bounded(tree: TreeSession) -> None:
    limit = sys.getrecursionlimit()
    tree.context_length = 10**6
    sys.setrecursionlimit(250)
    try:
        at = -1
        for index in range(300):
            at = direct(tree, at, [U], f"a{index}")
    finally:
        sys.setrecursionlimit(limit)
    assert len(tree.path(at)) == 300
    tree.nodes += tree.nodes[:1] * (MAX_NODES - 300)
    with pytest.raises(TooManyTurns):
        tree.prepare([U])


# --- leaves -----------------------------------------------------------------------------------------------------------


def random_tree(tree: TreeSession, seed: int, size: int) -> None:
    draw = random.Random(seed)
    for index in range(size):
        parent = draw.randrange(-1, len(tree.nodes)) if tree.nodes else -1
        fresh = [Message(role="user", content=f"q{index}")]
        direct(tree, parent, fresh, f"answer {index} " * draw.randrange(1, 4))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**16), size=st.integers(1, 14), name=st.sampled_from(sorted(pickers.PICKERS)))
def test_every_sampled_token_of_the_kept_leaves_is_trained_exactly_once(
    tokenizer: ChatTokenizer, seed: int, size: int, name: str
) -> None:
    tree = new_tree(tokenizer, None)
    random_tree(tree, seed, size)
    picker = pickers.PICKERS[name]
    kept = pickers.pick(tree, picker)
    found = assemble_all(tree, prompt_id="p", picker=picker)
    assert len(found) == len(kept)
    trained: dict[int, int] = {}
    for leaf, trajectory in zip(kept, found, strict=True):
        path = tree.path(leaf.node)
        assert trajectory.token_ids.tolist() == tree.row_to(leaf.node).tolist()
        assert trajectory.sampled.sum() == sum(node.sampled for node in path)
        for node in path:
            span = slice(node.row_end - node.sampled, node.row_end)
            assert trajectory.loss_mask[span].all() or not trajectory.loss_mask[span].any()
            trained[node.number] = trained.get(node.number, 0) + int(trajectory.loss_mask[span].all())
    assert all(count == 1 for count in trained.values())
    assert set(trained) == {number for leaf in kept for number in leaf.path}
    assert sum(int(each.loss_mask.sum()) for each in found) == sum(tree.nodes[number].sampled for number in trained)


def test_the_earliest_kept_leaf_trains_what_several_share(tree: TreeSession) -> None:
    root = direct(tree, -1, [U], "shared")
    direct(tree, root, [T1], "left")
    direct(tree, root, [T2], "right")
    both = assemble_all(tree, prompt_id="p", picker=pickers.keep_all)
    assert [int(each.loss_mask.sum()) for each in both] == [
        tree.nodes[0].sampled + tree.nodes[1].sampled,
        tree.nodes[2].sampled,
    ]
    (only,) = assemble_all(tree, prompt_id="p")  # drop-retries: the second child supersedes the first
    assert int(only.loss_mask.sum()) == tree.nodes[0].sampled + tree.nodes[2].sampled


def test_retries_are_dropped_below_a_turn_and_never_among_roots(tree: TreeSession) -> None:
    first = direct(tree, -1, [U], "one")
    direct(tree, -1, [U2], "compacted")
    direct(tree, first, [T1], "try")
    direct(tree, first, [T1], "again")
    assert [leaf.node for leaf in pickers.pick(tree, pickers.drop_retries)] == [1, 3]
    assert [leaf.node for leaf in pickers.pick(tree, pickers.keep_all)] == [1, 2, 3]
    assert len(pickers.pick(tree, pickers.longest)) == 1


WRONG: dict[str, Callable[..., Any]] = {
    "twice": lambda leaves: [leaves[0], leaves[0]],
    "made up": lambda leaves: [pickers.Leaf(node=0, path=(0,), tokens=1, sampled=1, retried=False)],
    "raises": lambda leaves: 1 / 0,
    "none": lambda leaves: None,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_picker_may_only_choose(name: str, tree: TreeSession) -> None:
    direct(tree, -1, [U], "one")
    with pytest.raises(PluginError, match="leaf picker"):
        pickers.pick(tree, WRONG[name])


def test_a_session_without_a_turn_is_a_trajectory_that_failed(tree: TreeSession) -> None:
    (found,) = assemble_all(tree, prompt_id="p")
    assert (found.status, found.length) == (Status.FAILED, 0)


def test_carried_answers_of_a_compacted_history_are_not_trained(tree: TreeSession) -> None:
    root = direct(tree, -1, [U], "alpha")
    direct(tree, root, [T1], "beta")
    summary = [Message(role="user", content="summary"), A2, U2]
    direct(tree, -1, summary, "gamma")
    found = assemble_all(tree, prompt_id="p")
    assert [each.loss_mask.sum() for each in found] == [
        tree.nodes[0].sampled + tree.nodes[1].sampled,
        tree.nodes[2].sampled,
    ]
    assert np.array_equal(found[1].loss_mask, found[1].sampled)


def brute_force(tree: TreeSession, messages: list[Message]) -> tuple[int, int]:
    best = (0, -1)
    for node in tree.nodes:
        stored = tree.messages_to(node.number)
        if list(stored) == messages[: len(stored)]:
            best = max(best, (len(stored), node.number))
    return best[1], best[0]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**16), size=st.integers(1, 16))
def test_the_attach_point_is_that_of_looking_at_every_node(tokenizer: ChatTokenizer, seed: int, size: int) -> None:
    tree, draw = new_tree(tokenizer, None), random.Random(seed)
    for _ in range(size):
        parent = draw.randrange(-1, len(tree.nodes)) if tree.nodes else -1
        before = list(tree.messages_to(parent)) if parent >= 0 else []
        messages = [*before, Message(role="user", content=draw.choice("ab"))]
        expected = brute_force(tree, messages)
        prepared = tree.prepare(messages)
        assert (prepared.base, len(messages) - len(prepared.messages)) == expected
        output = Output(finish_reason=FinishReason.STOP)
        output.ids.extend([*tree.family.tokenizer.encode(draw.choice("xy")), min(tree.family.stop_token_ids)])
        output.logprobs.extend([-0.5] * len(output.ids))
        output.stretches.append((len(output.ids), 0))
        number = tree.commit(prepared, output).turn
        node = tree.nodes[number]
        assert tree.row_to(number).tolist() == [*prepared.prompt_ids, *output.ids]
        assert list(node.messages[:-1]) == list(prepared.messages)
        shorter = [*tree.messages_to(draw.randrange(len(tree.nodes)))][: draw.randrange(1, 6)]
        assert tree.attach(shorter) == brute_force(tree, shorter)
