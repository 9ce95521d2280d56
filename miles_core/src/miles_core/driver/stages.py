"""The stages of a step, which the loops put in order. Each does one thing and returns what the next one needs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence

from miles_core import batching
from miles_core.config.checks_async import uncorrected
from miles_core.contracts import logprobs, routes, tokens, versions
from miles_core.contracts.report import Report, Verdict
from miles_core.driver import checkpoint, recovery
from miles_core.driver.run import Run
from miles_core.errors import ContractError
from miles_core.kinds.backend import RouteCounts, StepMetrics
from miles_core.rollout.evaluate import evaluate
from miles_core.rollout.scheduler import Collected, collect
from miles_core.types import TrainBatch
from miles_core.watch import progress, waiting
from miles_core.weights.equality import check_weight_update_equal
from miles_core.weights.lifecycle import PublishReport


def first_step(run: Run) -> int:
    """The number of steps that are done already."""
    if warning := uncorrected(run.spec):
        run.recorder.alarm(run.start_step, warning)
    return run.start_step


async def learn(run: Run, collected: Collected, step: int, *, max_staleness: int | None) -> dict[str, float]:
    """Check the four contracts on a batch, train on it, and return the step's metrics.

    Args:
        max_staleness: How many published versions the batch's oldest token may be behind; None is no limit.

    Raises:
        ContractError: the tokens or the versions contract is broken; nothing was trained.
    """
    batch = await _prepare(run, collected, step)
    counts = await _route_counts(run)
    # Work on millions of tokens runs in a thread, so that it does not hold up the event loop, where the rollout lives.
    reports = await asyncio.to_thread(
        check_contracts, run, collected, batch, version=run.version, max_staleness=max_staleness, counts=counts
    )
    run.recorder.contracts(step, reports)  # before the update: the evidence is there if the run ends here
    await asyncio.to_thread(run.recorder.rollouts, step, collected.groups, batch)
    refuse_broken(reports, version=run.version)
    metrics = await _update(run, batch, step)
    run.trained_step = step
    contract_metrics = {name: value for report in reports for name, value in report.figures.items()}
    return {**collected.stats, **contract_metrics, **metrics}


async def publish_first(run: Run) -> None:
    """Give the engines the trainer's weights before the first step.

    A checkpoint that was written after its step was published holds the weights of the version it names, so they are
    published under that number again. In every other case they become the next version.
    """
    version = run.version if run.published_step == run.start_step else run.version + 1
    await _publish(run, version, _publish_over_noise if run.spec.check_weight_update_equal else recovery.publish)


async def publish(run: Run) -> None:
    """Make the trainer's weights the next version on every engine, replaced ones included."""
    await _publish(run, run.version + 1, recovery.publish)


async def _publish(run: Run, version: int, how: Callable[[Run, int], Awaitable[PublishReport | None]]) -> None:
    with run.recorder.phase("publish"), waiting("driver", on=f"publishing weight version {version}"):
        report = await how(run, version)
    if report is not None:
        run.recorder.timings(report.figures)
    progress()


async def _publish_over_noise(run: Run, version: int) -> PublishReport:
    """Publish to engines whose weights were overwritten with noise, and compare every tensor."""
    report = await check_weight_update_equal(run.fleet.publish, run.engines, version, seed=run.spec.seed)
    recovery.note_published(run, version, report)
    run.recorder.event("weights_equal", version=version, tensors=report.num_tensors)
    return report


def publish_due(run: Run, step: int) -> bool:
    """Whether the engines get the weights of this step: at the interval, after the last step, and before an evaluation
    on them, whose score would otherwise be that of an earlier step."""
    every = run.spec.schedule.update_weights_interval
    return step % every == 0 or step == run.last_step or run.eval_here(step)


async def save(run: Run, step: int, metrics: Mapping[str, float]) -> None:
    """Write a checkpoint of `step`, unless there is one already."""
    if run.saved_step == step:
        return
    state = {
        "stream": run.stream.state(),
        "alarm": run.alarm.state(),
        "metrics": dict(metrics),
        "version": run.version,
        "published_step": run.published_step,
    }
    write_groups = None
    if run.pending is not None:
        state["pending"], write_groups = run.pending()
    with run.recorder.phase("save"), waiting("driver", on=f"saving step {step}"):
        path = await checkpoint.save(
            run.directory.checkpoints,
            step,
            state,
            run.trainer.save,
            write_groups=write_groups,
            keep=run.spec.checkpoint.keep,
        )
    run.saved_step = step
    run.recorder.event("save", step=step, path=str(path))
    progress()


async def finish_step(run: Run, step: int, metrics: Mapping[str, float]) -> None:
    """Evaluate if due, export a Hugging Face folder after the last step, and then write the step's line of metrics.

    The line comes last, so that a run is complete exactly if the line of its last step is there. Step 0 has a line only
    if it was evaluated.
    """
    figures = dict(metrics)
    if run.late is not None and run.eval_due(step):
        with run.recorder.phase("eval"):
            await run.late.submit(step, run.trainer.save_hf, final=step == run.last_step)
    elif run.eval_due(step):
        with run.recorder.phase("eval"), waiting("driver", on=f"evaluation after step {step}"):
            work = evaluate(
                step,
                prompts=run.eval_prompts,
                episodes=run.episodes,
                spec=run.spec.eval,
                retries=run.spec.rollout.retries,
                max_concurrent=run.spec.max_in_flight,
                version=run.version,
            )
            figures |= await recovery.attend(run, work)
        run.recorder.event("eval", step=step, reward=figures["eval/reward_mean"])
    if step == run.last_step and run.spec.checkpoint.export_hf:
        with run.recorder.phase("save"), waiting("driver", on="writing the Hugging Face folder"):
            await run.trainer.save_hf(run.directory.path / "hf")
    if figures:
        run.recorder.record(step, figures)
    progress()


def check_contracts(
    run: Run,
    collected: Collected,
    batch: TrainBatch,
    *,
    version: int,
    max_staleness: int | None,
    counts: RouteCounts | None,
) -> list[Report]:
    """Check all four contracts on the batch that will be trained.

    Args:
        version: The weight version that is published now.
        max_staleness: See `learn`.
        counts: How the recorded routes compare with the trainer's; None if that was not measured.
    """
    old_is_rollout = run.spec.objective.old_logprobs == "rollout"
    # If the trainer has moved on since the last publish, no token was sampled with the weights that score the batch.
    scored = version if run.published_step == run.trained_step else version + 1
    in_place = run.spec.schedule.on_weight_update == "in-place"
    weights = run.spec.weights
    proven = weights.verify != "off" or weights.probes > 0
    fresh = versions.fresh_tokens(batch, scored, mixed_keys=in_place)
    return [
        tokens.check(collected.groups, batch),
        routes.check(batch, num_experts=run.num_experts, mode=run.spec.rollout.routes, counts=counts, fresh=fresh),
        logprobs.check(batch, old_is_rollout=old_is_rollout, fresh=fresh, exact=run.spec.precision.true_on_policy),
        versions.check(collected.groups, current_version=version, max_staleness=max_staleness, proven=proven),
    ]


def refuse_broken(reports: Sequence[Report], *, version: int) -> None:
    """Stop the run if the tokens or the versions contract is broken.

    Raises:
        ContractError: one of them is; training would optimise trajectories that the policy never generated.
    """
    for report in reports:
        if report.status is Verdict.BROKEN and report.name in ("tokens", "versions"):
            raise ContractError(
                f"the {report.name} contract is broken",
                found="; ".join(report.offenders),
                where=f"weight version {version}",
                do="report the engine or session that made these trajectories",
            )


# --- inside a step ----------------------------------------------------------------------------------------------------


async def collect_batch(run: Run, step: int) -> Collected:
    """Collect the groups of a step in waves."""
    schedule = run.spec.schedule
    with run.recorder.phase("rollout"), waiting("driver", on=f"rollout of step {step}"):
        collected = await collect(
            step,
            stream=run.stream,
            episodes=run.episodes,
            spec=run.spec.rollout,
            filters=run.filters,
            groups=schedule.groups_per_step,
            group_size=schedule.group_size,
            on_accept=run.recorder.groups_done,
        )
    report_rollout(run, collected, step)
    run.recorder.timings(collected.wasted)
    return collected


def report_rollout(run: Run, collected: Collected, step: int) -> None:
    """Tell the user about rewards that never differ, and record what failed."""
    if warning := run.alarm.observe(collected.rewards):
        run.recorder.alarm(step, warning)
    if collected.failures:
        run.recorder.event("failures", step=step, **{str(k): v for k, v in collected.failures.items()})


async def _prepare(run: Run, collected: Collected, step: int) -> TrainBatch:
    """The groups as one batch, with the log-probs of the old policy and of the reference policy."""
    objective = run.spec.objective
    batch = await asyncio.to_thread(batching.pack, collected.groups)
    with run.recorder.phase("log_probs"), waiting("driver", on=f"log-probs of step {step}"):
        if objective.old_logprobs == "trainer":
            batch = batching.with_old_logprobs(batch, await run.trainer.log_probs(batch))
        else:
            batch = batching.with_old_logprobs(batch, None)
        if objective.kl_coef > 0:
            batch = batching.with_ref_logprobs(batch, await run.trainer.log_probs(batch, model="reference"))
    progress()
    return batch


async def _route_counts(run: Run) -> RouteCounts | None:
    """How routes compared in the scoring pass of `_prepare`; None if the trainer scored nothing or routes are off."""
    if run.spec.rollout.routes == "off" or run.spec.objective.old_logprobs == "rollout":
        return None
    return await run.trainer.route_counts()


async def _update(run: Run, batch: TrainBatch, step: int) -> dict[str, float]:
    objective, learning = run.spec.objective, run.learning
    batch, correction_metrics = batching.with_corrections(batch, learning.corrections)
    kl = None
    if objective.kl_coef > 0 and objective.kl_in == "reward":
        kl = batching.kl_in_reward(batch, coef=objective.kl_coef, estimator=objective.kl_estimator)
    batch = batching.with_advantages(batch, learning.advantage, learning.advantage_options, kl=kl)
    length = objective.fixed_length_tokens or run.spec.rollout.sampling.max_tokens
    parts = batching.split_updates(batch, run.spec.schedule.minibatches)
    results: list[StepMetrics] = []
    with run.recorder.phase("train"), waiting("driver", on=f"optimizer steps of step {step}"):
        for part in parts:
            weighted = batching.with_token_weights(
                part, objective.reduction, length if objective.reduction == "fixed-length" else None
            )
            results.append(await run.trainer.train_step(weighted))
            progress()
    for result in results:
        if result.skipped:
            run.recorder.alarm(step, f"optimizer step skipped: {result.skipped}")
    run.recorder.tokens(batch.num_tokens, batch.num_loss_tokens)
    return {**correction_metrics, **combine(results, [part.num_loss_tokens for part in parts])}


def combine(results: Sequence[StepMetrics], loss_tokens: Sequence[int]) -> dict[str, float]:
    """One set of metrics for all optimizer steps of a step, as ``train/…``: means over those that were taken, weighted
    by trained tokens; the last learning rate; and the number of those that were skipped."""
    taken = [(r.values, n) for r, n in zip(results, loss_tokens, strict=True) if r.skipped is None]
    total = sum(n for _, n in taken)
    metrics = {"train/skipped_updates": float(len(results) - len(taken))}
    for name in taken[0][0] if taken else ():
        metrics[f"train/{name}"] = math.fsum(values[name] * n for values, n in taken) / total
    if taken:
        metrics["train/lr"] = taken[-1][0]["lr"]
    return metrics
