"""Keys that have no effect in some run: setting one there is an error, since a setting silently ignored is a trap.

A value that equals the default does not count as set: a run-file with every default written out must stay valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from miles_core.config.checks import Found, Setup, value_at
from miles_core.config.spec import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Unused:
    """Keys that nothing reads while `when` holds; setting one to other than its default is an error."""

    id: str
    paths: tuple[str, ...]
    when: Callable[[Setup], bool]
    because: str
    do: str
    reads: tuple[str, ...]
    kinds: tuple[str, ...] = ()


EVAL_LATE = ("eval.engines", "eval.function", "eval.max_in_flight", "eval.overflow", "eval.timeout_s")

UNUSED: tuple[Unused, ...] = (
    Unused(
        id="MIL901",
        paths=("data",),
        when=lambda s: s.provides("environment", "provides-prompts"),
        because="the environment brings its own prompts, so nothing reads `data`",
        do="remove it, or pick an environment without prompts, such as `chat`",
        reads=(),
        kinds=("environment",),
    ),
    Unused(
        id="MIL902",
        paths=("eval.prompts", "eval.samples_per_prompt", "eval.sampling", "eval.on", *EVAL_LATE),
        when=lambda s: s.spec.eval.every_steps is None,
        because="evaluation is off, so nothing reads it",
        do="set eval.every_steps, or remove it; `eval: null` is off, whatever else the section held",
        reads=("eval.every_steps",),
    ),
    Unused(
        id="MIL910",
        paths=("eval.engines",),
        when=lambda s: s.spec.eval.every_steps is not None and s.spec.eval.on != "dedicated",
        because="only a dedicated fleet has engines of its own",
        do="set eval.on: dedicated, or remove it",
        reads=("eval.on",),
    ),
    Unused(
        id="MIL911",
        paths=("eval.function",),
        when=lambda s: s.spec.eval.every_steps is not None and s.spec.eval.on != "external",
        because="only an external evaluation calls a function",
        do="set eval.on: external, or remove it",
        reads=("eval.on",),
    ),
    Unused(
        id="MIL912",
        paths=("eval.max_in_flight", "eval.overflow", "eval.timeout_s"),
        when=lambda s: s.spec.eval.every_steps is not None and s.spec.eval.on == "shared",
        because="evaluation on the engines that roll out holds training back until it is done",
        do="set eval.on: dedicated or external, or remove it",
        reads=("eval.on",),
    ),
    Unused(
        id="MIL903",
        paths=("rollout.reward_timeout_s", "rollout.reward_workers"),
        when=lambda s: not s.spec.rewards,
        because="no reward is picked, so nothing reads it",
        do="remove it, or add a reward",
        reads=("rewards",),
    ),
    Unused(
        id="MIL904",
        paths=("objective.kl_in", "objective.kl_estimator"),
        when=lambda s: s.spec.objective.kl_coef == 0,
        because="objective.kl_coef is 0, so no KL is measured",
        do="set objective.kl_coef above 0, or remove it",
        reads=("objective.kl_coef",),
    ),
    Unused(
        id="MIL905",
        paths=("objective.fixed_length_tokens",),
        when=lambda s: s.spec.objective.reduction != "fixed-length",
        because="only the reduction `fixed-length` reads it",
        do="set objective.reduction: fixed-length, or remove it",
        reads=("objective.reduction",),
    ),
    Unused(
        id="MIL906",
        paths=("optimizer.min_lr_ratio",),
        when=lambda s: s.spec.optimizer.schedule == "constant",
        because="a constant schedule has no end to decay to",
        do="set optimizer.schedule: cosine or linear, or remove it",
        reads=("optimizer.schedule",),
    ),
    Unused(
        id="MIL907",
        paths=(
            "schedule.max_concurrent_samples",
            "schedule.refill",
            "schedule.max_weight_staleness",
            "schedule.unused_groups",
            "schedule.drain_s",
        ),
        when=lambda s: s.spec.schedule.mode != "fully-async",
        because="only a fully asynchronous run reads it",
        do="set schedule.mode: fully-async, or remove it",
        reads=("schedule.mode",),
    ),
    Unused(
        id="MIL908",
        paths=("schedule.update_weights_interval",),
        when=lambda s: s.spec.schedule.mode == "sync",
        because="a synchronous run samples every batch with the newest weights",
        do="set schedule.mode: one-step-off or fully-async, or remove it",
        reads=("schedule.mode",),
    ),
    Unused(
        id="MIL909",
        paths=("rollout.over_sample", "rollout.max_concurrent"),
        when=lambda s: s.spec.schedule.mode == "fully-async",
        because="a fully asynchronous run collects in no waves",
        do="remove it; schedule.max_concurrent_samples says how much is in flight",
        reads=("schedule.mode",),
    ),
)


def check_unused(setup: Setup) -> Iterator[Found]:
    """Every key that is set although nothing will read it."""
    for unused in UNUSED:
        if unused.when(setup):
            yield from _set_anyway(setup, unused)


def _set_anyway(setup: Setup, unused: Unused) -> Iterator[Found]:
    for path in unused.paths:
        if value_at(setup.spec, path) != default_at(path):
            yield Found(
                id=unused.id,
                path=path,
                message=unused.because,
                do=unused.do,
                reads=(path, *unused.reads),
                kinds=frozenset(unused.kinds),
                show=path not in ("data", "eval.sampling"),
            )


_MINIMAL = RunSpec.model_validate({"name": "x", "model": "x", "schedule": {"steps": 1}})


def default_at(path: str) -> Any:
    """The default of a key; None for those without one."""
    return value_at(_MINIMAL, path)
