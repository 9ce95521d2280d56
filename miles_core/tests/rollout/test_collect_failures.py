"""collect: retries, and figures that add up whatever goes wrong."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.errors import EngineError, RewardError, RunError
from miles_core.kinds.reward import Scored
from miles_core.rollout.filters import nonzero_std
from miles_core.rollout.scheduler import Collected, GroupFilter
from miles_core.testing.scripted_session import Answer, Asked
from miles_core.types import Boundary, Status

from .bench import Bench, names, question


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
