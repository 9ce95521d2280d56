"""RewardPool: every way a reward can go wrong fails that one call, and only that."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from miles_core.errors import PluginError, RewardError
from miles_core.kinds.reward import Scored
from miles_core.rollout.reward_process import RewardProcess
from miles_core.rollout.rewards import RewardPool, RewardSpec, RewardTimeout
from miles_core.testing.waiting import until
from miles_core.types import Message, Prompt

GRADERS = Path(__file__).with_name("graders.py")


def scored(response: str = "abc") -> Scored:
    prompt = Prompt(id="p1", messages=(Message(role="user", content="q"),))
    answer = Message(role="assistant", content=response)
    return Scored(prompt=prompt, messages=(*prompt.messages, answer), response=response, truncated=False, metadata={})


def reward(name: str, weight: float = 1.0, options: Mapping[str, Any] | None = None) -> RewardSpec:
    return RewardSpec(name=name, load=f"{GRADERS}:{name}", weight=weight, options=options or {})


def pool(*rewards: RewardSpec, workers: int = 1, timeout_s: float = 30.0) -> RewardPool:
    return RewardPool(rewards, workers=workers, timeout_s=timeout_s)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_rewards_are_weighted_summed_and_their_parts_kept() -> None:
    picked = (reward("length", 2.0, {"scale": 0.5}), reward("parts", -1.0), reward("asynchronous", 0.25))
    async with pool(*picked, workers=2) as rewards:
        total, found = await rewards.score(scored("four"))
    assert total == 2.0 * 2.0 - 0.5 + 0.25 * 2.0
    assert found == {"length": 2.0, "parts": 0.5, "parts.format": 1.0, "parts.answer": 0.25, "asynchronous": 2.0}


async def test_workers_import_neither_torch_nor_ray_nor_transformers() -> None:
    async with pool(reward("imports")) as rewards:
        assert (await rewards.score(scored()))[0] == 0.0


async def test_a_reward_that_prints_and_reads_does_not_disturb_the_protocol() -> None:
    async with pool(reward("chatty"), reward("length")) as rewards:
        assert (await rewards.score(scored()))[0] == 1.0 + 3.0
        assert (await rewards.score(scored()))[0] == 1.0 + 3.0


async def test_set_order_is_the_same_in_every_worker() -> None:
    found = set()
    for _ in range(3):
        async with pool(reward("hash_order")) as rewards:
            found.add((await rewards.score(scored()))[0])
    assert len(found) == 1


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ("raise", r"ValueError: no such answer \(.*graders\.py:42\)"),
        ("nan", "the reward is nan"),
        ("inf", "the reward is inf"),
        ("1e39", r"the reward is 1e\+39"),
        ("none", r"must be a number, found None \(returned by .*graders\.py:38\)"),
        ("text", "must be a number, found '1.0'"),
        ("no-reward", "needs the key 'reward'"),
        ("bad-part", "part 'x' is nan"),
        ("sys.exit", "SystemExit"),
    ],
)
async def test_what_is_no_finite_number_is_a_failure_and_never_a_score(response: str, message: str) -> None:
    async with pool(reward("by_response")) as rewards:
        with pytest.raises(RewardError, match=message) as raised:
            await rewards.score(scored(response))
        assert not isinstance(raised.value, RewardTimeout)
        assert rewards.restarts == 0
        assert (await rewards.score(scored("0.5")))[0] == 0.5


async def test_a_worker_that_dies_fails_its_call_and_is_replaced() -> None:
    async with pool(reward("by_response")) as rewards:
        with pytest.raises(RewardError, match="exit code 7"):
            await rewards.score(scored("exit"))
        assert rewards.restarts == 1
        assert (await rewards.score(scored("0.5")))[0] == 0.5


@pytest.mark.parametrize("response", ["hang", "ignore-signals"])
async def test_a_hung_reward_is_killed_at_its_deadline(response: str) -> None:
    async with pool(reward("by_response"), timeout_s=0.3) as rewards:
        with pytest.raises(RewardTimeout, match=r"deadline of 0\.3 s"):
            await rewards.score(scored(response))
        rewards._timeout_s = 60.0  # whatever else goes on, this answer is to come
        assert (await rewards.score(scored("0.5")))[0] == 0.5


async def test_the_loop_stays_free_while_a_reward_hangs() -> None:
    async with pool(reward("by_response"), timeout_s=60.0) as rewards:
        call = asyncio.create_task(rewards.score(scored("hang")))
        for _ in range(5):
            await asyncio.sleep(0.01)
        assert not call.done()  # a blocked loop would come back when the call has ended
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


async def test_a_killed_worker_takes_its_children_along(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    async with pool(reward("leaves_a_child"), timeout_s=60.0) as rewards:
        call = asyncio.create_task(rewards.score(scored(str(note))))
        await until(lambda: note.exists() and note.read_text())
        child = int(note.read_text())
        assert alive(child)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await until(lambda: not alive(child))


async def test_a_blocked_event_loop_does_not_turn_a_quick_reward_into_a_timeout(tmp_path: Path) -> None:
    """The answer comes within the deadline, and the driver sees it long after."""
    async with pool(reward("by_response"), timeout_s=1.0) as rewards:
        for _ in range(10):  # a machine that stands still for a second may make the grader late after all
            note = tmp_path / "began"
            call = asyncio.create_task(rewards.score(scored(f"note {note}")))
            await until(note.exists)
            time.sleep(1.2)  # noqa: ASYNC251 - the fault under test: the driver is busy for longer than the deadline
            (found,) = await asyncio.gather(call, return_exceptions=True)
            if not isinstance(found, RewardTimeout):
                break
            note.unlink()
        assert found == (1.0, {"by_response": 1.0})


async def test_waiting_for_a_worker_does_not_count_against_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call waits for those before it, and each is given the whole deadline once its worker begins."""
    given: list[float] = []
    original = RewardProcess.receive_within

    async def noting(self: RewardProcess, timeout_s: float) -> Any:
        given.append(timeout_s)
        return await original(self, timeout_s)

    monkeypatch.setattr(RewardProcess, "receive_within", noting)
    async with pool(reward("by_response"), timeout_s=20.0) as rewards:
        calls = [rewards.score(scored("sleep 0.05")) for _ in range(5)]
        assert [total for total, _ in await asyncio.gather(*calls)] == [1.0] * 5
    assert given == [20.0] * 5


async def test_answers_belong_to_their_calls_whatever_order_they_finish_in() -> None:
    async with pool(reward("by_response"), workers=2) as rewards:
        asked = ["sleep 0.2", "2", "3", "sleep 0.1", "5", "6"]
        found = await asyncio.gather(*(rewards.score(scored(text)) for text in asked))
        assert [total for total, _ in found] == [1.0, 2.0, 3.0, 1.0, 5.0, 6.0]


async def test_a_cancelled_call_does_not_leave_its_answer_to_the_next_one() -> None:
    async with pool(reward("by_response")) as rewards:
        call = asyncio.create_task(rewards.score(scored("sleep 600")))
        await asyncio.sleep(0.1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await rewards.score(scored("0.5")))[0] == 0.5


async def test_the_first_failing_reward_of_the_run_file_is_reported() -> None:
    slow = RewardSpec(name="slow", load=f"{GRADERS}:by_response")
    quick = RewardSpec(name="quick", load=f"{GRADERS}:by_response")
    async with pool(slow, quick, workers=2) as rewards:
        with pytest.raises(RewardError, match="'slow'"):
            await rewards.score(scored("raise"))


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (f"{GRADERS}:missing", "missing"),
        ("no_such_module_at_all:score", "no_such_module_at_all"),
        (f"{GRADERS}:not_callable", "not a function"),
    ],
)
async def test_a_reward_that_cannot_be_loaded_stops_before_anything_runs(load: str, message: str) -> None:
    rewards = pool(RewardSpec(name="bad", load=load), workers=2)
    with pytest.raises(PluginError, match=message):
        async with rewards:
            pass


async def test_closing_leaves_no_process() -> None:
    rewards = pool(reward("length"), workers=2)
    await rewards.start()
    pids = [worker._process.pid for worker in rewards._workers if worker._process]
    assert len(pids) == 2
    await rewards.close()
    await rewards.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_calls_under_way_or_waiting_fail_when_the_pool_closes() -> None:
    rewards = pool(reward("by_response"))
    await rewards.start()
    calls = [asyncio.create_task(rewards.score(scored("sleep 600"))) for _ in range(3)]
    await asyncio.sleep(0.1)
    await rewards.close()
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(each, RewardError) for each in found)
    assert all(worker._process is None for worker in rewards._workers)


async def test_a_run_without_rewards_has_no_score_and_no_process() -> None:
    async with pool() as rewards:
        assert rewards.empty
        assert await rewards.score(scored()) == (None, {})


async def test_workers_die_with_their_driver(tmp_path: Path) -> None:
    """A driver that is killed leaves no grader behind, not even one stuck inside a regular expression."""
    script = f"""
import asyncio
from miles_core.kinds.reward import Scored
from miles_core.rollout.rewards import RewardPool, RewardSpec
from miles_core.types import Prompt

async def main():
    spec = RewardSpec(name="r", load={str(GRADERS)!r} + ":by_response")
    async with RewardPool([spec], workers=1, timeout_s=600) as pool:
        print(pool._workers[0]._process.pid, flush=True)
        prompt = Prompt(id="p", messages=())
        await pool.score(Scored(prompt=prompt, messages=(), response="hang", truncated=False, metadata={{}}))

asyncio.run(main())
"""
    driver = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    assert driver.stdout is not None
    worker = int(await driver.stdout.readline())
    await asyncio.sleep(0.2)
    assert alive(worker)
    driver.kill()
    await driver.communicate()
    await until(lambda: not alive(worker))


def test_equal_sums_do_not_depend_on_worker_order() -> None:
    # 0.1 + 0.2 + 0.3 differs from 0.3 + 0.2 + 0.1 in the last bit: the sum follows the run-file, not the clock.
    async def total() -> float | None:
        scales = (0.1, 0.2, 0.3)
        picked = [RewardSpec(name=f"r{s}", load=f"{GRADERS}:length", options={"scale": s}) for s in scales]
        async with pool(*picked, workers=2) as rewards:
            return (await rewards.score(scored("x")))[0]

    assert asyncio.run(total()) == 0.1 + 0.2 + 0.3
