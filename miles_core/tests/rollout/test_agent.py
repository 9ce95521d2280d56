"""Agent programs against a served session: what they are told, what is trained, how they end."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from miles_core.errors import EngineError
from miles_core.options import AgentOptions
from miles_core.rollout.agent import AgentEnvironment, Task
from miles_core.rollout.episode import EpisodeKey, Episodes
from miles_core.rollout.rewards import RewardPool
from miles_core.session.assembly import assemble_attempt
from miles_core.session.default_family import DefaultFamily
from miles_core.session.factory import SessionFactory
from miles_core.session.matching import strict
from miles_core.testing.served_script import scripted_engine
from miles_core.testing.tiny import write_tiny_tokenizer
from miles_core.testing.waiting import until
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Boundary, Message, Prompt, SamplingParams, Status, Trajectory

PROMPT = Prompt(id="p", messages=(Message(role="user", content="hello"),), label="secret", metadata={"a": 1})
KEY = EpisodeKey(purpose="train", step=1, epoch=0, draw=0, sample=0)

PROGRAM = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
messages = task["messages"]
for _ in range(2):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "m", "messages": messages, "temperature": 0.3}).encode(),
        {"content-type": "application/json"},
    )
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages += [answer, {"role": "user", "content": "go on"}]
with open(os.environ["MILES_RESULT"], "w") as file:
    seen = {"seen": sorted(task), "secret": os.environ.get("SECRET"), "own": os.environ["OWN"]}
    json.dump({"reward": 0.5, "metadata": seen}, file)
"""


class Workplace:
    def __init__(
        self, folder: Path, *, history: Any = "linear", texts: tuple[str, ...] = ("one", "two", "three")
    ) -> None:
        write_tiny_tokenizer(folder)
        self.family = DefaultFamily(None, ChatTokenizer.from_dir(folder))
        self.engine: Any = scripted_engine(self.family, list(texts))
        self.sessions = SessionFactory([self.engine], self.family, strict, context_length=2000, history=history)

    @asynccontextmanager
    async def environment(self, **options: Any) -> AsyncIterator[AgentEnvironment]:
        environment = AgentEnvironment(AgentOptions(**options))
        try:
            yield environment
        finally:
            await environment.close()

    async def attempt(self, timeout_s: float = 30.0, **options: Any) -> Trajectory:
        async with self.environment(**options) as environment, RewardPool([], workers=1, timeout_s=5) as rewards:
            episodes = Episodes(
                environment=environment,
                sessions=self.sessions,
                rewards=rewards,
                seed=0,
                timeout_s=timeout_s,
                assemble=partial(assemble_attempt),
            )
            generated = await episodes.generate(PROMPT, SamplingParams(max_tokens=50), KEY)
            return await episodes.score(generated)


DEADLINES_S = (0.5, 2.0, 8.0, 32.0)
"""Tried in turn until one is long enough for the agent to come as far as the test needs it to."""


def command(folder: Path, text: str) -> str:
    file = folder / "agent.py"
    file.write_text(text)
    return f"{sys.executable} {file}"


async def test_a_command_plays_its_episode_over_http_and_is_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "token")
    found = await Workplace(tmp_path).attempt(command=command(tmp_path, PROGRAM), env={"OWN": "x"})
    assert (found.status, found.reward, found.metadata["turns"]) == (Status.COMPLETED, 0.5, 2)
    assert [message.content for message in found.messages] == ["hello", "one", "go on", "two"]
    assert found.temperature == 1.0
    assert found.metadata["overridden_sampling"] == {"temperature": 0.3}
    assert "label" not in found.metadata["seen"]
    assert (found.metadata["secret"], found.metadata["own"]) == (None, "x")


async def test_a_command_that_fails_is_a_failed_attempt_that_keeps_its_turns(tmp_path: Path) -> None:
    text = PROGRAM.split("with open")[0] + "sys.exit('no luck')\n"
    found = await Workplace(tmp_path).attempt(command=command(tmp_path, text))
    assert found.status is Status.FAILED
    assert found.failure is not None
    assert found.failure.boundary is Boundary.ENVIRONMENT
    assert found.failure.message.splitlines()[0].endswith("the agent ended with exit code 1: no luck")
    assert found.metadata["turns"] == 2


async def test_a_program_that_raises_is_told_with_its_last_line(tmp_path: Path) -> None:
    found = await Workplace(tmp_path).attempt(command=command(tmp_path, "def play():\n    return 1 / 0\n\nplay()\n"))
    assert found.failure is not None
    first = found.failure.message.splitlines()[0]
    assert first.endswith(f"code 1: ZeroDivisionError: division by zero ({tmp_path}/agent.py:2)")


async def test_a_function_that_raises_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text("async def play(task):\n    return task.nothing\n")
    found = await Workplace(tmp_path).attempt(function=f"{tmp_path}/agents.py:play")
    assert found.failure is not None
    assert found.failure.boundary is Boundary.ENVIRONMENT
    assert found.failure.message.endswith("agents.py:2)")


async def test_words_of_the_model_on_the_output_score_nothing(tmp_path: Path) -> None:
    text = PROGRAM.split("with open")[0] + "print(json.dumps({'reward': 1.0}))\n"
    found = await Workplace(tmp_path).attempt(command=command(tmp_path, text))
    assert found.failure is not None
    assert found.failure.boundary is Boundary.REWARD


async def test_a_command_that_runs_late_is_killed_with_its_children(tmp_path: Path) -> None:
    text = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
time.sleep(600)
"""
    for deadline_s in DEADLINES_S:
        found = await Workplace(tmp_path).attempt(timeout_s=deadline_s, command=command(tmp_path, text))
        assert found.failure is not None
        assert found.failure.timed_out
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            break
    pid = int((tmp_path / "pid").read_text())
    try:
        await until(lambda: not running(pid), "that the child ends with its episode")
    except AssertionError:
        os.kill(pid, 9)
        raise


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


async def ask(task: Task, history: list[dict[str, Any]]) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.post(f"{task.base_url}/v1/chat/completions", json={"messages": history})


async def function_agent(task: Task) -> dict[str, Any]:
    history: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    await ask(task, history)
    return {"reward": 1}


async def forking_agent(task: Task) -> float:
    """Asks, forks a sub-agent, goes on."""
    first: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    said = (await ask(task, first)).json()["choices"][0]["message"]
    await ask(task, [{"role": "user", "content": "sub task"}])
    await ask(task, [*first, said, {"role": "user", "content": "go on"}])
    return 1.0


async def failing_agent(task: Task) -> None:
    found = await ask(task, [{"role": "user", "content": "hello"}])
    assert found.status_code == 502


async def late_agent(task: Task) -> None:
    await ask(task, [{"role": "user", "content": "hello"}])


async def test_a_function_is_an_agent_too(tmp_path: Path) -> None:
    found = await Workplace(tmp_path).attempt(function=f"{__file__}:function_agent")
    assert (found.status, found.reward) == (Status.COMPLETED, 1.0)


async def test_a_forking_agent_is_one_attempt_of_several_rows(tmp_path: Path) -> None:
    found = await Workplace(tmp_path, history="branching").attempt(function=f"{__file__}:forking_agent")
    assert (found.status, found.reward, len(found.branches)) == (Status.COMPLETED, 1.0, 1)
    contents = [[message.content for message in row.messages] for row in found.rows]
    assert contents == [["sub task", "two"], ["hello", "one", "go on", "three"]]
    assert all(row.loss_mask.any() for row in found.rows)


async def test_an_engine_that_fails_is_the_engines_failure_whatever_the_agent_makes_of_it(tmp_path: Path) -> None:
    place = Workplace(tmp_path)
    place.engine._script = lambda request: EngineError("lost")
    found = await place.attempt(function=f"{__file__}:failing_agent")
    assert found.failure is not None
    assert found.failure.boundary is Boundary.ENGINE


async def test_a_deadline_during_a_served_turn_is_the_engines(tmp_path: Path) -> None:
    for deadline_s in DEADLINES_S:
        place = Workplace(tmp_path)
        await place.engine.pause()
        found = await place.attempt(timeout_s=deadline_s, function=f"{__file__}:late_agent")
        if place.engine.requests:
            break
    assert found.failure is not None
    assert (found.failure.boundary, found.failure.timed_out) == (Boundary.ENGINE, True)
    assert not place.engine.running


def test_an_agent_is_a_command_or_a_function() -> None:
    for options in ({}, {"command": "a", "function": "m:f"}):
        with pytest.raises(ValueError, match="not both"):
            AgentOptions(**options)


def test_a_task_is_json() -> None:
    task = Task(prompt=PROMPT, base_url="u", key="k")
    assert json.loads(json.dumps(task.as_json()))["messages"] == [{"role": "user", "content": "hello"}]
