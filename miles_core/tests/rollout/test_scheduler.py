"""collect: waves, filters, early stop."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from miles_core.config.spec import RolloutSpec
from miles_core.errors import PluginError, RunError
from miles_core.kinds.reward import Scored
from miles_core.rollout.filters import nonzero_std
from miles_core.rollout.scheduler import Collected, GroupFilter, collect
from miles_core.testing.scripted_session import Answer, Asked
from miles_core.testing.virtual_time import in_virtual_time
from miles_core.types import Group

from .bench import Bench, drop, names, question


async def test_groups_come_complete_in_the_order_their_generation_finished() -> None:
    order = Bench().first_ids(3)
    slow = dict(zip(order, (30, 3, 12), strict=True))
    collected = await Bench(lambda asked: Answer(content="3", ticks=slow[question(asked)])).collect()
    assert names(collected) == [order[1], order[2], order[0]]
    assert all(len(group.trajectories) == 2 for group in collected.groups)
    assert [t.metadata["sample"] for t in collected.groups[0].trajectories] == [0, 1]


@pytest.mark.parametrize("seed", range(5))
async def test_slow_rewards_change_neither_which_groups_are_kept_nor_their_order(seed: int) -> None:
    noise = random.Random(seed)
    ticks = {f"q{i}": noise.randrange(1, 40) for i in range(50)}

    async def run(reward_ticks: Callable[[Scored], int]) -> Collected:
        bench = Bench(
            lambda asked: Answer(content=f"{asked.params.seed}", ticks=ticks[question(asked)]), ticks=reward_ticks
        )
        filters = [GroupFilter(name="nonzero-std", judge=nonzero_std)]
        return await bench.collect(groups=4, over_sample=2.0, filters=filters)

    quick = await run(lambda scored: 0)
    slow = await run(lambda scored: noise.randrange(0, 200))
    assert names(quick) == names(slow)
    assert quick.stats == slow.stats
    assert quick.rewards == slow.rewards


async def test_a_place_is_given_on_when_generation_ends_and_not_when_the_reward_does() -> None:
    running: list[int] = []
    bench = Bench(lambda asked: Answer(content="1", ticks=4), ticks=lambda scored: 500)
    original = bench.episodes.generate

    async def counted(*args: Any) -> Any:
        running.append(sum(session.waiting for session in bench.sessions.opened))
        return await original(*args)

    bench.episodes.generate = counted  # type: ignore[method-assign]
    collected = await bench.collect(groups=4, size=3, max_concurrent=2)
    assert max(running) <= 2
    assert len(running) == 12
    assert collected.stats["rollout/trained"] == 12


async def test_over_sampling_stops_early_and_aborts_the_surplus() -> None:
    order = Bench().first_ids(6)
    bench = Bench(lambda asked: Answer(content="1", hangs=question(asked) not in order[2:5]))
    collected = await bench.collect(groups=3, over_sample=2.0)
    assert sorted(names(collected)) == sorted(order[2:5])
    assert collected.stats["rollout/groups_submitted"] == 6
    assert collected.stats["rollout/groups_aborted"] == 3
    assert collected.wasted["rollout/aborted_attempts_cut"] == 6
    assert all(session.waiting == 0 for session in bench.sessions.opened)


@pytest.mark.parametrize(("groups", "factor", "started"), [(25, 1.12, 28), (3, 1.0, 3), (4, 1.3, 6), (8, 1.25, 10)])
async def test_a_wave_is_as_large_as_the_run_file_says(groups: int, factor: float, started: int) -> None:
    bench = Bench(lambda asked: "1")
    collected = await bench.collect(groups=groups, size=1, over_sample=factor)
    assert collected.stats["rollout/groups_submitted"] == started
    assert bench.stream.state()["drawn"] == started


async def test_dropped_groups_are_counted_by_reason_and_made_up_in_a_further_wave() -> None:
    bench = Bench()
    collected = await bench.collect(groups=3, filters=[drop("zero_std", None, "too_long")])
    assert len(collected.groups) == 3
    assert collected.stats["rollout/waves"] == 2
    assert collected.stats["rollout/filtered/zero_std"] == 1
    assert collected.stats["rollout/filtered/too_long"] == 1
    assert collected.stats["rollout/groups_submitted"] == 5
    assert bench.stream.state()["drawn"] == 5


async def test_a_further_wave_starts_only_after_the_last_was_judged() -> None:
    judged_when_opened: list[int] = []
    judged = 0

    def judge(group: Group) -> str | None:
        nonlocal judged
        judged += 1
        return "no" if judged <= 4 else None

    def script(asked: Asked) -> str:
        judged_when_opened.append(judged)
        return "1"

    await Bench(script).collect(groups=4, size=1, filters=[GroupFilter(name="f", judge=judge)])
    assert judged_when_opened == [0] * 4 + [4] * 4


async def test_all_filters_must_keep_and_the_first_reason_counts() -> None:
    filters = [drop(None, "a"), drop("b")]
    collected = await Bench().collect(groups=2, filters=filters)
    assert collected.stats["rollout/filtered/b"] == 1
    assert collected.stats["rollout/filtered/a"] == 1


@pytest.mark.parametrize("verdict", [False, True, 3, ""])
async def test_a_filter_without_a_verdict_is_a_plugin_error(verdict: Any) -> None:
    with pytest.raises(PluginError, match="gave no verdict"):
        await Bench().collect(filters=[GroupFilter(name="f", judge=lambda group: verdict)])


async def test_a_filter_that_raises_ends_the_step_by_its_name() -> None:
    def judge(group: Group) -> str | None:
        raise KeyError("oops")

    with pytest.raises(PluginError, match=r"filter 'f' raised KeyError: 'oops' \(.*test_scheduler\.py:\d+\)") as caught:
        await Bench().collect(filters=[GroupFilter(name="f", judge=judge)])
    assert isinstance(caught.value.__cause__, KeyError)


async def test_a_defect_in_a_task_surfaces_and_cancels_the_rest() -> None:
    def script(asked: Asked) -> Answer | str:
        if question(asked) == target:
            raise MemoryError("broken session")  # scripts run inside the session, as a defect of ours would
        return Answer(hangs=True)

    bench = Bench(script)
    target = bench.first_ids(2)[1]
    original = bench.sessions.open

    def broken(session_id: str, params: Any) -> Any:
        if len(bench.sessions.opened) == 3:
            raise MemoryError("no more sessions")
        return original(session_id, params)

    bench.sessions.open = broken  # type: ignore[method-assign]
    with pytest.raises(MemoryError, match="no more sessions"):
        await bench.collect()


@in_virtual_time
async def test_a_cancelled_step_leaves_nothing_behind() -> None:
    bench = Bench(lambda asked: Answer(hangs=True))
    task = asyncio.create_task(
        collect(1, stream=bench.stream, episodes=bench.episodes, spec=RolloutSpec(), groups=2, group_size=2)
    )
    await asyncio.sleep(0.01)
    assert len(bench.sessions.opened) == 4
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.sessions.left_open == []
    assert len(asyncio.all_tasks()) == 1


async def test_filters_that_leave_nothing_end_the_run_with_the_counts() -> None:
    filters = [GroupFilter(name="nonzero-std", judge=nonzero_std)]
    with pytest.raises(RunError, match="zero_std 6") as raised:
        await Bench(lambda asked: "1").collect(groups=3, filters=filters, max_waves=2)
    assert "easier or more varied prompts" in str(raised.value)


async def test_progress_is_told_as_groups_are_accepted() -> None:
    told: list[int] = []
    await Bench().collect(groups=3, on_accept=told.append)
    assert told == [1, 2, 3]


async def test_a_dataset_smaller_than_a_step_is_drawn_several_times() -> None:
    collected = await Bench(prompts=2).collect(groups=5, size=1)
    assert sorted(names(collected)).count("q0") in (2, 3)
    rows = [group.trajectories[0] for group in collected.groups]
    assert len({row.session_id for row in rows}) == 5
    assert len({bytes(row.token_ids) for row in rows}) == 5  # each draw has a seed of its own


async def test_two_steps_from_a_saved_position_equal_the_uninterrupted_ones() -> None:
    filters = [GroupFilter(name="nonzero-std", judge=nonzero_std)]
    whole = Bench()
    first = await whole.collect(filters=filters, over_sample=1.5)
    saved = json.loads(json.dumps(whole.stream.state()))
    second = await whole.collect(filters=filters, over_sample=1.5, step=2)
    resumed = Bench()
    resumed.stream.restore(saved)
    again = await resumed.collect(filters=filters, over_sample=1.5, step=2)
    assert (names(again), again.stats, again.rewards) == (names(second), second.stats, second.rewards)
    assert names(first) != names(second)
