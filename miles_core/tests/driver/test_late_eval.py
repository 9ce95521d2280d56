"""Evaluation beside training: order, overflow, skips, what is taken up again, and that one score is of one step."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import save_file

from miles_core.config.spec import EvalSpec, RunSpec
from miles_core.driver.eval_fleet import FleetScorer
from miles_core.driver.eval_function import FunctionScorer
from miles_core.driver.late_eval import EvalSkipped, LateEvaluations
from miles_core.errors import RunError, TrainerLost
from miles_core.kinds.engine import EngineContext
from miles_core.rollout.chat import ChatEnvironment
from miles_core.rollout.episode import Episodes
from miles_core.rollout.rewards import RewardPool
from miles_core.session.pool import EnginePool
from miles_core.testing.recording import RecordingEngine, RecordingOptions, example_weights
from miles_core.testing.scripted_session import ScriptedSessions, assemble_scripted
from miles_core.testing.virtual_time import in_virtual_time
from miles_core.types import Message, Prompt, Trajectory
from miles_core.weights import snapshot
from miles_core.weights.lifecycle import UpdateSettings
from miles_core.weights.proof import DeliveryProof

PROMPTS = [Prompt(id=f"e{i}", messages=(Message(role="user", content=f"{i}"),), label=i) for i in range(3)]
RUN = RunSpec.model_validate({"name": "x", "model": "x", "schedule": {"steps": 9}, "eval": {"prompts": 2}})


class Gate:
    """A scorer whose evaluations end when told to."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.ends: dict[int, asyncio.Event] = {}
        self.errors: dict[int, Exception] = {}

    async def score(self, step: int, folder: Path) -> dict[str, float]:
        assert snapshot.step_of(folder) == step
        self.begun.append(step)
        await self.ends.setdefault(step, asyncio.Event()).wait()
        if step in self.errors:
            raise self.errors[step]
        return {"eval/reward_mean": float(step)}

    def end(self, *steps: int) -> None:
        for step in steps:
            self.ends.setdefault(step, asyncio.Event()).set()


class Place:
    def __init__(self, root: Path, scorer: Any, **settings: Any) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.events: list[str] = []
        self.step = 0
        recorder: Any = SimpleNamespace(
            evaluated=lambda step, figures: self.lines.append((step, dict(figures))),
            event=lambda kind, **facts: self.events.append(kind),
            alarm=lambda step, message: self.events.append(message),
        )
        self.late = LateEvaluations(EvalSpec(**settings), root, scorer, recorder, now=lambda: self.step)

    async def submit(self, step: int, *, final: bool = False) -> None:
        self.step = step
        await self.late.submit(step, export, final=final)


async def export(folder: Path) -> None:
    folder.mkdir(parents=True)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0.002)


@in_virtual_time
async def test_training_goes_on_and_the_score_stands_under_the_step_it_measured(tmp_path: Path) -> None:
    gate = Gate()
    place = Place(tmp_path, gate)
    await place.submit(2)
    place.step = 7
    await settle()
    assert (gate.begun, place.lines) == ([2], [])
    gate.end(2)
    await place.late.drain()
    ((step, figures),) = place.lines
    assert (step, figures["eval/reward_mean"], figures["eval/lag_steps"]) == (2, 2.0, 5.0)
    assert figures["eval/latency_s"] > 0
    assert list(tmp_path.iterdir()) == [], "a snapshot lies on disk no longer than its evaluation needs it"


@in_virtual_time
async def test_training_waits_for_the_oldest_where_too_many_are_open(tmp_path: Path) -> None:
    gate = Gate()
    place = Place(tmp_path, gate, max_in_flight=2)
    await place.submit(1)
    await place.submit(2)
    third = asyncio.create_task(place.submit(3))
    await settle()
    assert not third.done()
    assert gate.begun == [1], "one after the other"
    gate.end(1)
    await third
    gate.end(2, 3)
    await place.late.drain()
    assert [step for step, _ in place.lines] == [1, 2, 3]


@in_virtual_time
async def test_or_the_new_one_is_skipped_and_counted_but_never_the_last(tmp_path: Path) -> None:
    gate = Gate()
    place = Place(tmp_path, gate, max_in_flight=1, overflow="skip")
    await place.submit(1)
    await place.submit(2)
    assert place.lines == [(2, {"eval/skipped/busy": 1.0})]
    assert place.late.skipped == {"busy": 1}
    last = asyncio.create_task(place.submit(3, final=True))
    await settle()
    assert not last.done()
    gate.end(1, 3)
    await last
    await place.late.drain()
    assert [step for step, _ in place.lines] == [2, 1, 3]


@in_virtual_time
async def test_whatever_fails_is_a_counted_skip_and_what_comes_after_is_scored(tmp_path: Path) -> None:
    gate = Gate()
    gate.errors = {1: EvalSkipped("raised", "no idea"), 2: ZeroDivisionError("by zero")}
    place = Place(tmp_path, gate, max_in_flight=9, timeout_s=0.2)
    gate.end(1, 2, 4)
    for step in (1, 2, 3, 4):
        await place.submit(step)
    await place.late.drain()
    skips = [next(iter(figures)) for _, figures in place.lines[:3]]
    assert skips == ["eval/skipped/raised", "eval/skipped/crashed", "eval/skipped/timeout"]
    assert place.lines[3][1]["eval/reward_mean"] == 4.0
    assert any("by zero" in event for event in place.events)


@in_virtual_time
async def test_an_export_that_fails_is_a_skip_but_a_lost_rank_is_not(tmp_path: Path) -> None:
    place = Place(tmp_path, Gate())

    async def full(folder: Path) -> None:
        folder.mkdir(parents=True)
        raise RunError("the disk is full")

    async def lost(folder: Path) -> None:
        raise RunError("save_hf failed") from TrainerLost("rank 1 is gone")

    await place.late.submit(1, full, final=False)
    assert place.lines == [(1, {"eval/skipped/export_failed": 1.0})]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TrainerLost):
        await place.late.submit(2, lost, final=False)


@in_virtual_time
async def test_what_a_killed_run_had_begun_is_taken_up_and_the_rest_removed(tmp_path: Path) -> None:
    killed = Place(tmp_path, Gate(), max_in_flight=9)
    for step in (1, 2, 3, 4):
        await killed.submit(step)
    await settle()
    await killed.late.close()
    (tmp_path / "step_000000").mkdir()  # no marker: it was being written
    gate = Gate()
    place = Place(tmp_path, gate)
    place.late.take_up(4, scored={1})  # killed between the score and the removal of its snapshot
    gate.end(2, 3)
    await place.late.drain()
    assert [step for step, _ in place.lines] == [2, 3]
    assert list(tmp_path.iterdir()) == []


# --- a fleet of its own -----------------------------------------------------------------------------------------------


class Numbers(RewardPool):
    def __init__(self) -> None:
        super().__init__((), workers=1, timeout_s=1.0)

    async def score(self, scored: Any) -> tuple[float | None, dict[str, float]]:
        return float(scored.response), {}


class Fleet:
    """Two recording engines that load snapshots of `example_weights`."""

    def __init__(self, root: Path, options: RecordingOptions | None = None, during: Any = lambda fleet: None) -> None:
        self.root, self.restarts, self.options = root, [], options or RecordingOptions()
        engines: list[Any] = [self._engine(3), self._engine(4)]
        for engine in engines:
            engine._running.set()

        async def restart(index: int) -> Any:
            self.restarts.append(index)
            engine = self._engine(index)
            await engine.start()
            return engine

        def said(asked: Any) -> str:
            during(self)
            return str(asked.messages[-1].content)

        def assemble(session: Any, **facts: Any) -> Trajectory:
            trajectory = assemble_scripted(session, **facts)
            version = self.scorer.engines[0]._version  # type: ignore[attr-defined]
            spans = tuple(replace(span, weight_version=version) for span in trajectory.spans)
            return replace(trajectory, spans=spans)

        executor: Any = SimpleNamespace(restart_engine=restart)
        self.scorer = FleetScorer(
            spec=RUN,
            executor=executor,
            engines=engines,
            first_index=3,
            pool=EnginePool(engines),
            episodes=Episodes(
                environment=ChatEnvironment(),
                sessions=ScriptedSessions(said),
                rewards=Numbers(),
                seed=0,
                timeout_s=9.0,
                assemble=assemble,
            ),
            prompts=PROMPTS,
            settings=UpdateSettings(timeout_s=9.0, proof=DeliveryProof(verify="always")),
        )

    def _engine(self, index: int) -> RecordingEngine:
        context = EngineContext(model_path="", context_length=None, device="cpu", seed=0, index=index)
        return RecordingEngine(self.options, context)

    async def score(self, step: int, *, weights_of: int | None = None) -> dict[str, float]:
        async def save(folder: Path) -> None:
            folder.mkdir(parents=True)
            tensors = example_weights(step if weights_of is None else weights_of)
            save_file({name: t.clone().contiguous() for name, t in tensors.items()}, folder / "model.safetensors")

        return await self.scorer.score(step, await snapshot.write(self.root, step, save))


@in_virtual_time
async def test_every_engine_loads_the_snapshot_and_says_so_before_and_after(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    for step in (2, 5):
        assert (await fleet.score(step))["eval/reward_mean"] == 0.5
        for engine in fleet.scorer.engines:
            assert await engine.version() == step
            expected = example_weights(step)
            assert all((engine.weights[name] == tensor).all() for name, tensor in expected.items())  # type: ignore[attr-defined]
    assert fleet.restarts == []


@in_virtual_time
async def test_a_load_that_fails_starts_the_fleet_anew_and_is_tried_again(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, RecordingOptions(fail_receive=(4, 0), fail_times=1))
    fleet.options = RecordingOptions()
    assert (await fleet.score(2))["eval/reward_mean"] == 0.5
    assert fleet.restarts == [3, 4]


@in_virtual_time
async def test_an_engine_that_moves_to_other_weights_meanwhile_spoils_the_score(tmp_path: Path) -> None:
    def move(fleet: Fleet) -> None:
        fleet.scorer.engines[1]._version = 9  # type: ignore[attr-defined]

    with pytest.raises(EvalSkipped, match=r"serve \[9\], expected 2") as caught:
        await Fleet(tmp_path, during=move).score(2)
    assert caught.value.reason == "wrong_version"


@in_virtual_time
async def test_a_lost_engine_ends_the_attempt_and_no_request_goes_on_elsewhere(tmp_path: Path) -> None:
    asked: list[int] = []

    def lose_once(fleet: Fleet) -> None:
        asked.append(0)
        if len(asked) == 1:
            fleet.scorer.pool.lose(0, "it died")

    fleet = Fleet(tmp_path, during=lose_once)
    assert (await fleet.score(2))["eval/reward_mean"] == 0.5
    assert fleet.restarts == [3, 4]


@in_virtual_time
async def test_a_snapshot_without_its_marker_is_never_loaded(tmp_path: Path) -> None:
    receiver = snapshot.SnapshotReceiver(str(tmp_path))
    folder = await snapshot.write(tmp_path, 4, export)
    assert receiver.materialise(4) == folder
    folder.rename(snapshot.folder_of(tmp_path, 5))
    for step in (4, 5):
        with pytest.raises(Exception, match="no snapshot to load"):
            receiver.materialise(step)


# --- a function of the user's -----------------------------------------------------------------------------------------

GRADER = """
import os
def good(folder, facts):
    print("to stderr, not into the protocol")
    return {"reward": sum(p["label"] for p in facts["prompts"]), "step": facts["step"], "here": folder.is_dir()}
def bad(folder, facts):
    raise KeyError("answer")
def dies(folder, facts):
    os._exit(3)
"""


@pytest.mark.parametrize(("name", "reason"), [("bad", "raised"), ("dies", "crashed"), ("absent", "not_imported")])
async def test_a_function_that_fails_says_how(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "grader.py").write_text(GRADER)
    with pytest.raises(EvalSkipped) as caught:
        await FunctionScorer(f"{tmp_path}/grader.py:{name}", RUN, PROMPTS).score(1, tmp_path)
    assert caught.value.reason == reason


async def test_a_function_gets_folder_and_facts_and_its_figures_are_the_score(tmp_path: Path) -> None:
    (tmp_path / "grader.py").write_text(GRADER)
    figures = await FunctionScorer(f"{tmp_path}/grader.py:good", RUN, PROMPTS).score(6, tmp_path)
    assert figures == {"eval/reward_mean": 1, "eval/prompts": 2, "eval/reward/step": 6, "eval/reward/here": 1}
