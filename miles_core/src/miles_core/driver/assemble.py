"""Opens every part of a validated run, in the order in which they need one another, and closes them in reverse."""

from __future__ import annotations

import functools
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from miles_core.config.model_folder import ModelFolder, read_model_folder
from miles_core.config.resolve import ResolvedRun
from miles_core.config.spec import RunSpec
from miles_core.data.order import PromptStream
from miles_core.data.source import PromptSet, build_prompts
from miles_core.driver import checkpoint, recovery
from miles_core.driver.eval_fleet import FleetScorer
from miles_core.driver.eval_function import FunctionScorer
from miles_core.driver.families import pick_family
from miles_core.driver.late_eval import LateEvaluations, Scorer
from miles_core.driver.recorder import Recorder
from miles_core.driver.run import Learning, Run
from miles_core.driver.settings import Device, choose_device, engine_spec, option_values, trainer_spec
from miles_core.driver.signals import StopRequest
from miles_core.errors import CheckpointError
from miles_core.kinds.engine import Engine
from miles_core.kinds.environment import Environment
from miles_core.kinds.executor import Executor, Trainer
from miles_core.kinds.tito_family import TitoFamily
from miles_core.kinds.transport import Transport
from miles_core.registry import Registry, load_target
from miles_core.rollout.alarm import ConstantRewardAlarm
from miles_core.rollout.episode import Episodes
from miles_core.rollout.first_failures import FirstFailures
from miles_core.rollout.rewards import RewardPool, reward_specs
from miles_core.rollout.scheduler import GroupFilter
from miles_core.session.assembly import assemble_attempt
from miles_core.session.factory import SessionFactory
from miles_core.session.leaves import PICKERS
from miles_core.session.matching import warning_of
from miles_core.session.pool import EnginePool
from miles_core.tokenizer import ChatTokenizer
from miles_core.tracking.run_dir import RunDir
from miles_core.types import Prompt
from miles_core.user_function import function_target
from miles_core.watch import waiting
from miles_core.weights.fleet import Fleet
from miles_core.weights.lifecycle import UpdateSettings
from miles_core.weights.proof import DeliveryProof, probe_prompts


@asynccontextmanager
async def open_run(
    resolved: ResolvedRun, registry: Registry, directory: RunDir, recorder: Recorder, stop: StopRequest, *, resume: bool
) -> AsyncIterator[Run]:
    """A run that is ready to start: data read, processes started, checkpoint loaded. What is quick to fail comes first.

    Raises:
        MilesError: a part could not be opened; those opened before it are closed again.
    """
    spec = resolved.spec
    async with AsyncExitStack() as stack:
        environment: Environment = make(resolved, "environment")
        stack.push_async_callback(environment.close)
        stream = PromptStream(_prompts(resolved, environment, "train", recorder), seed=spec.seed)
        eval_prompts: Sequence[Prompt] = ()
        if spec.eval.every_steps is not None:
            eval_prompts = _prompts(resolved, environment, "eval", recorder)
        tokenizer = ChatTokenizer.from_dir(spec.model.path)
        family = pick_family(resolved, registry, tokenizer, warn=functools.partial(recorder.alarm, 0))
        model = read_model_folder(Path(spec.model.path))
        found = _checkpoint(directory, recorder) if resume else None

        rewards = RewardPool(
            reward_specs(resolved), workers=spec.rollout.reward_workers, timeout_s=spec.rollout.reward_timeout_s
        )
        await stack.enter_async_context(rewards)
        device = choose_device(spec.placement.device)
        executor, trainer, engines = await _start(resolved, directory, recorder, device, stack)
        transport: Transport = make(resolved, "transport")
        stack.push_async_callback(transport.close)
        await transport.open(trainer, engines)
        pool = EnginePool(engines)

        episodes = functools.partial(_episodes, resolved, model, environment, family, rewards)
        if warning := warning_of(load_target(resolved.one["matcher"].capability.load)):
            recorder.alarm(0, warning)
        run = Run(
            spec=spec,
            directory=directory,
            recorder=recorder,
            trainer=trainer,
            executor=executor,
            engines=engines,
            pool=pool,
            fleet=Fleet(transport, trainer, engines, update_settings(resolved, trainer, model)),
            stream=stream,
            eval_prompts=eval_prompts,
            episodes=episodes(
                pool, first_failures=FirstFailures(functools.partial(recorder.alarm, 0), wave=_first_wave(spec))
            ),
            filters=_filters(resolved),
            learning=_learning(resolved),
            alarm=ConstantRewardAlarm(steps=spec.rollout.constant_reward_alarm_steps),
            num_experts=model.experts,
            stop=stop,
            make_buffer=functools.partial(make, resolved, "data_buffer"),
        )
        stack.push_async_callback(recovery.end_restarts, run)
        if found is not None:
            await _restore(run, found)
        late = spec.eval.every_steps is not None and spec.eval.on != "shared"
        run.complete = _is_complete(run, scored=not _open_evaluations(run, wanted=late))
        if resume and not run.complete:
            directory.keep_steps_before(run.start_step)
        if late and not run.complete:
            run.late = await _late_evaluations(resolved, run, episodes, device)
            stack.push_async_callback(run.late.close)
            run.late.take_up(run.start_step, scored=directory.scored_steps())
        yield run


def make(resolved: ResolvedRun, kind: str, *context: Any) -> Any:
    """The object of the capability that the run picks for `kind`: created with its options, then `context`."""
    pick = resolved.one[kind]
    return load_target(pick.capability.load)(pick.options, *context)


# --- parts ------------------------------------------------------------------------------------------------------------


def _prompts(resolved: ResolvedRun, environment: Environment, split: Any, recorder: Recorder) -> PromptSet:
    prompts = build_prompts(resolved.spec.data, environment, split)
    recorder.event("prompts", split=split, origin=prompts.origin, count=len(prompts), bad_rows=len(prompts.problems))
    if prompts.problems:
        first = "; ".join(str(problem) for problem in prompts.problems[:3])
        recorder.alarm(0, f"{len(prompts.problems)} unusable rows of {prompts.origin} were skipped: {first}")
    return prompts


async def _start(
    resolved: ResolvedRun, directory: RunDir, recorder: Recorder, device: Device, stack: AsyncExitStack
) -> tuple[Executor, Trainer, list[Engine]]:
    """Start the trainer and the engines; `stack` ends them."""
    executor: Executor = make(resolved, "executor")
    stack.push_async_callback(executor.close)
    with recorder.phase("start"), waiting("driver", on="the trainer and the engines to start"):
        trainer = await executor.start_trainer(trainer_spec(resolved, device))
        engines = list(await executor.start_engines(engine_spec(resolved, device, directory.logs)))
    recorder.event("placed", **await executor.describe())
    return executor, trainer, engines


def _episodes(
    resolved: ResolvedRun,
    model: ModelFolder,
    environment: Environment,
    family: TitoFamily,
    rewards: RewardPool,
    pool: EnginePool,
    *,
    first_failures: FirstFailures | None,
    trained: bool = True,
) -> Episodes:
    """Episodes on the engines of a pool; those that will be `trained` also record routes, if the run wants them."""
    spec = resolved.spec
    sessions = SessionFactory(
        pool,
        family,
        load_target(resolved.one["matcher"].capability.load),
        context_length=context_length(spec.model.context_length, model.context_length),
        routes=trained and spec.rollout.routes != "off",
        history=spec.session.history,
    )
    return Episodes(
        environment=environment,
        sessions=sessions,
        rewards=rewards,
        seed=spec.seed,
        timeout_s=spec.rollout.trajectory_timeout_s,
        assemble=functools.partial(assemble_attempt, picker=PICKERS[spec.session.leaves]),
        first_failures=first_failures,
    )


def _open_evaluations(run: Run, *, wanted: bool) -> list[Path]:
    """Snapshots that an earlier process left unevaluated. They are deleted if the run does not want them evaluated any
    more."""
    left = sorted(run.directory.snapshots.glob("step_*"))
    if wanted or not left:
        return left
    names = ", ".join(folder.name for folder in left)
    run.recorder.alarm(run.start_step, f"open evaluations are given up, as eval.on is no longer what it was: {names}")
    for folder in left:
        shutil.rmtree(folder)
    return []


async def _late_evaluations(
    resolved: ResolvedRun, run: Run, episodes: Callable[..., Episodes], device: Device
) -> LateEvaluations:
    """What evaluates beside training. If it has engines of its own, they are started here."""
    spec, root = resolved.spec, run.directory.snapshots.absolute()
    scorer: Scorer
    if spec.eval.on == "external":
        assert spec.eval.function is not None
        scorer = FunctionScorer(function_target("evaluation", spec.eval.function), spec, run.eval_prompts)
    else:
        assert spec.eval.engines is not None
        told = replace(engine_spec(resolved, device, run.directory.logs), count=spec.eval.engines, routes=False)
        with run.recorder.phase("start"), waiting("driver", on="the evaluation's engines to start"):
            engines = list(await run.executor.start_engines(told))
        run.recorder.event("placed", **await run.executor.describe())
        pool = EnginePool(engines)
        scorer = FleetScorer(
            spec=spec,
            executor=run.executor,
            engines=engines,
            first_index=len(run.engines),
            pool=pool,
            episodes=episodes(pool, first_failures=None, trained=False),
            prompts=run.eval_prompts,
            settings=UpdateSettings(timeout_s=spec.weights.timeout_s, proof=DeliveryProof(verify=spec.weights.verify)),
        )
    return LateEvaluations(spec.eval, root, scorer, run.recorder, now=lambda: run.trained_step)


def _first_wave(spec: RunSpec) -> int:
    """Trajectories that run at once when the run begins."""
    if spec.schedule.mode == "fully-async":
        return spec.max_in_flight
    return min(spec.schedule.groups_per_step * spec.schedule.group_size, spec.max_in_flight)


def context_length(wanted: int | None, limit: int | None) -> int:
    """The longest prompt plus output, in tokens: what the run-file says, but no more than the checkpoint's limit."""
    return min(length for length in (wanted, limit, 2**31 - 1) if length)


def update_settings(resolved: ResolvedRun, trainer: Trainer, model: ModelFolder) -> UpdateSettings:
    """How weight updates are done and proved, as the run-file says."""
    weights = resolved.spec.weights
    probes: Sequence[tuple[int, ...]] = ()
    if weights.probes and model.vocabulary is not None:
        probes = probe_prompts(weights.probes, model.vocabulary, resolved.spec.seed)
    return UpdateSettings(
        overlap="stages-aside" in resolved.one["engine"].capability.provides,
        timeout_s=weights.timeout_s,
        proof=DeliveryProof(
            verify=weights.verify,
            probes=probes,
            score=trainer.log_probs,
            routes=resolved.spec.rollout.routes != "off",
            weight_bytes=model.narrowest_bytes,
        ),
    )


def _filters(resolved: ResolvedRun) -> list[GroupFilter]:
    return [
        GroupFilter(name=pick.capability.name, judge=load_target(pick.capability.load), options=option_values(pick))
        for pick in resolved.many.get("filter", ())
    ]


def _learning(resolved: ResolvedRun) -> Learning:
    advantage = resolved.one["advantage"]
    return Learning(
        advantage=load_target(advantage.capability.load),
        advantage_options=option_values(advantage),
        corrections=[
            (pick.capability.name, load_target(pick.capability.load), option_values(pick))
            for pick in resolved.many.get("correction", ())
        ],
    )


# --- resume -----------------------------------------------------------------------------------------------------------


def _checkpoint(directory: RunDir, recorder: Recorder) -> checkpoint.Checkpoint | None:
    found, passed_over = checkpoint.newest(directory.checkpoints)
    for line in passed_over:
        recorder.alarm(0, f"checkpoint passed over: {line}")
    if found is None and passed_over:
        raise CheckpointError(
            "no checkpoint of this run can be used",
            expected="at least one complete checkpoint",
            found="; ".join(passed_over),
            where=str(directory.checkpoints),
            do="restore one of them, or start anew with --fresh, which keeps this run aside",
        )
    return found


def _is_complete(run: Run, *, scored: bool) -> bool:
    """Whether the run has nothing left to do: not a step, not the last step's line, not an evaluation."""
    if run.start_step == run.last_step:
        return scored and run.directory.last_step() == run.last_step
    return run.start_step > run.last_step


async def _restore(run: Run, found: checkpoint.Checkpoint) -> None:
    with waiting("driver", on=f"loading {found.path}"):
        await run.trainer.load(found.backend_dir)
    if found.step == 0:  # `miles convert` wrote it: weights, and no step that anything else would remember
        run.recorder.event("resume", step=0, checkpoint=str(found.path))
        return
    run.stream.restore(found.state["stream"])
    run.alarm.restore(found.state["alarm"])
    run.start_step = run.saved_step = run.trained_step = found.step
    run.resumed_metrics = found.state["metrics"]
    run.version = found.state.get("version", found.step - 1)
    run.published_step = found.state.get("published_step", found.step - 1)
    run.resumed = found
    run.recorder.event("resume", step=found.step, checkpoint=str(found.path))
