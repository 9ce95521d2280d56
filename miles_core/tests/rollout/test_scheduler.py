"""collect: waves, retries, filters, early stop; and figures that add up whatever goes wrong."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core import watch
from miles_core.config.spec import RolloutSpec
from miles_core.data.order import PromptStream
from miles_core.errors import EngineError, PluginError, RewardError, RunError
from miles_core.kinds.environment import EpisodeResult, SessionHandle
from miles_core.kinds.reward import Scored
from miles_core.rollout.episode import Episodes
from miles_core.rollout.filters import nonzero_std
from miles_core.rollout.rewards import RewardPool
from miles_core.rollout.scheduler import Collected, GroupFilter, collect
from miles_core.testing.scripted_session import Answer, Asked, ScriptedSessions, assemble_scripted
from miles_core.types import Boundary, Group, Message, Prompt, Status

Script = Callable[[Asked], Answer | str]


class Grading(RewardPool):
    """A pool without processes: scores in the event loop, after as many ticks as the test wants."""

    def __init__(self, grade: Callable[[Scored], float], ticks: Callable[[Scored], int] = lambda scored: 0) -> None:
        super().__init__((), workers=1, timeout_s=1.0)
        self._grade = grade
        self._ticks = ticks

    async def score(self, scored: Scored) -> tuple[float | None, dict[str, float]]:
        for _ in range(self._ticks(scored)):
            await asyncio.sleep(0)
        return self._grade(scored), {}


class Chat:
    def prompts(self, split: Literal["train", "eval"]) -> Sequence[Prompt] | None:
        return None

    async def run(self, prompt: Prompt, session: SessionHandle) -> EpisodeResult:
        await session.complete(prompt.messages)
        return EpisodeResult()

    async def close(self) -> None:
        return None


class Bench:
    """A stream of prompts ``q0 … q<n-1>`` and everything `collect` needs."""

    def __init__(
        self,
        script: Script = lambda asked: f"{asked.params.seed}",
        grade: Callable[[Scored], float] = lambda scored: float(int(scored.response) % 7),
        *,
        prompts: int = 50,
        ticks: Callable[[Scored], int] = lambda scored: 0,
        seed: int = 0,
    ) -> None:
        items = [Prompt(id=f"q{i}", messages=(Message(role="user", content=f"q{i}"),)) for i in range(prompts)]
        self.stream = PromptStream(items, seed=seed)
        self.sessions = ScriptedSessions(script)
        self.episodes = Episodes(
            environment=Chat(),
            sessions=self.sessions,
            rewards=Grading(grade, ticks),
            seed=seed,
            timeout_s=60.0,
            assemble=assemble_scripted,
        )

    async def collect(
        self,
        *,
        groups: int = 3,
        size: int = 2,
        filters: Sequence[GroupFilter] = (),
        step: int = 1,
        on_accept: Callable[[int], None] | None = None,
        **spec: Any,
    ) -> Collected:
        try:
            return await collect(
                step,
                stream=self.stream,
                episodes=self.episodes,
                spec=RolloutSpec(**spec),
                filters=filters,
                groups=groups,
                group_size=size,
                on_accept=on_accept,
            )
        finally:
            assert self.sessions.left_open == []
            assert len(asyncio.all_tasks()) == 1, "collect left tasks behind"
            assert watch.waiters() == []

    def first_ids(self, count: int) -> list[str]:
        fresh = PromptStream(self.stream._prompts, seed=self.stream._seed)
        return [draw.prompt.id for draw in fresh.take(count)]


def names(collected: Collected) -> list[str]:
    return [group.prompt.id for group in collected.groups]


def question(asked: Asked) -> str:
    return asked.messages[-1].content


def drop(*reasons: str | None) -> GroupFilter:
    """A filter that gives these verdicts in turn, then keeps."""
    verdicts = list(reasons)
    return GroupFilter(name="listed", judge=lambda group: verdicts.pop(0) if verdicts else None)


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

    with pytest.raises(PluginError, match="filter 'f' raised KeyError: 'oops'") as caught:
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


async def test_a_failed_trajectory_is_tried_again_with_another_seed() -> None:
    seeds: list[int | None] = []

    def script(asked: Asked) -> Answer | str:
        seeds.append(asked.params.seed)
        return Answer(error=EngineError("gone")) if len(seeds) == 1 else "2"

    collected = await Bench(script).collect(groups=1, size=2, retries=1)
    assert len(set(seeds)) == len(seeds) == 3
    assert [t.status for t in collected.groups[0].trajectories] == [Status.COMPLETED] * 2
    assert collected.groups[0].trajectories[0].metadata["attempt"] == 1
    assert collected.stats["rollout/retried"] == 1
    assert collected.stats["rollout/dropped"] == 0
    assert collected.stats["rollout/failed/engine"] == 1
    assert collected.failures == {"engine": "gone"}


async def test_retries_end_and_the_failure_stays_out_of_the_group() -> None:
    def script(asked: Asked) -> Answer | str:
        return Answer(error=EngineError("gone")) if "-0-a" in asked.session_id else "2"

    bench = Bench(script)
    collected = await bench.collect(groups=1, size=3, retries=2)
    (group,) = collected.groups
    assert [t.status for t in group.trajectories] == [Status.FAILED, Status.COMPLETED, Status.COMPLETED]
    assert [t.reward for t in group.trainable] == [2.0, 2.0]
    assert group.trajectories[0].reward is None
    assert collected.rewards == (2.0, 2.0)
    assert collected.stats["rollout/reward_mean"] == 2.0
    assert collected.stats["rollout/attempts"] == 5
    assert collected.stats["rollout/dropped"] == 1


async def test_a_failed_reward_is_tried_again_by_generating_again() -> None:
    def grade(scored: Scored) -> float:
        if scored.response == "bad":
            raise RewardError("grader down")
        return 1.0

    collected = await Bench(lambda asked: "bad" if asked.session_id.endswith("a0") else "good", grade).collect(
        retries=1
    )
    assert collected.stats["rollout/failed/reward"] == 6
    assert collected.stats["rollout/retried"] == 6
    assert all(len(group.trainable) == 2 for group in collected.groups)


async def test_a_group_that_goes_back_to_generate_loses_its_place_in_line() -> None:
    order = Bench().first_ids(2)

    def script(asked: Asked) -> Answer:
        first = question(asked) == order[0]
        return Answer(content="bad" if first and asked.session_id.endswith("a0") else "3", ticks=1 if first else 5)

    def grade(scored: Scored) -> float:
        if scored.response == "bad":
            raise RewardError("down")
        return 1.0

    collected = await Bench(script, grade, ticks=lambda scored: 20).collect(groups=2, size=1)
    assert names(collected) == [order[1], order[0]]


async def test_a_group_of_failures_only_is_dropped_and_the_error_says_what_failed() -> None:
    bench = Bench(lambda asked: Answer(error=EngineError("CUDA is gone")))
    with pytest.raises(RunError) as raised:
        await bench.collect(groups=2, retries=1, max_waves=3)
    text = str(raised.value)
    assert "0 accepted, 6 judged" in text
    assert "no_trainable 6" in text
    assert "CUDA is gone" in text
    assert len(bench.sessions.opened) == 2 * 2 * 2 * 3
    assert bench.stream.state()["drawn"] == 6


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


TROUBLE = st.sampled_from(["ok", "ok", "ok", "engine", "reward", "long", "slow"])


@settings(max_examples=40, deadline=None)
@given(
    fates=st.lists(TROUBLE, min_size=1, max_size=40),
    groups=st.integers(1, 3),
    size=st.integers(1, 3),
    retries=st.integers(0, 2),
    over_sample=st.sampled_from([1.0, 1.5, 2.0]),
    picky=st.booleans(),
)
def test_the_figures_add_up_whatever_goes_wrong(
    fates: list[str], groups: int, size: int, retries: int, over_sample: float, picky: bool
) -> None:
    def script(asked: Asked) -> Answer | str:
        fate = fates[(asked.params.seed or 0) % len(fates)]
        if fate == "engine":
            return Answer(error=EngineError("gone"))
        return Answer(content=f"{fate} {asked.params.seed}", ticks=17 if fate == "slow" else 2)

    def grade(scored: Scored) -> float:
        if scored.response.startswith("reward"):
            raise RewardError("down")
        return float(int(scored.response.split()[1]) % 3)

    async def run() -> tuple[Collected, Bench]:
        bench = Bench(script, grade)
        filters = [GroupFilter(name="nonzero-std", judge=nonzero_std)] if picky else []
        return await bench.collect(
            groups=groups, size=size, retries=retries, over_sample=over_sample, filters=filters, max_waves=4
        ), bench

    try:
        collected, bench = asyncio.run(run())
    except RunError:
        return
    figures = {name.removeprefix("rollout/"): value for name, value in collected.stats.items()}
    failed = sum(figures[f"failed/{boundary}"] for boundary in Boundary) + figures["engine_aborted"]
    filtered = sum(value for name, value in figures.items() if name.startswith("filtered/"))
    judged = figures["groups_accepted"] + filtered
    assert figures["groups_submitted"] == judged + figures["groups_aborted"]
    assert figures["groups_submitted"] == bench.stream.state()["drawn"]
    assert figures["attempts"] == figures["succeeded"] + failed
    assert figures["attempts"] == size * judged + figures["retried"]
    assert failed == figures["retried"] + figures["dropped"]
    assert figures["trained"] == sum(len(group.trainable) for group in collected.groups) <= figures["succeeded"]
    assert figures["groups_accepted"] == groups == len(collected.groups)
    assert len(collected.rewards) == figures["succeeded"]
    rewards = [t.reward for group in collected.groups for t in group.trainable if t.reward is not None]
    assert math.isclose(figures["reward_mean"], sum(rewards) / len(rewards))
