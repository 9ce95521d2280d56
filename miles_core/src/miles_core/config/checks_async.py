"""What must hold between keys of the core if sampling and training overlap."""

from __future__ import annotations

from miles_core.config.checks import Check, Setup
from miles_core.config.spec import RunSpec
from miles_core.options import BoundedBufferOptions


def _async_colocated(s: Setup) -> str | None:
    if s.spec.schedule.mode != "sync" and s.spec.placement.mode == "colocated":
        return f"a {s.spec.schedule.mode} run samples and trains at the same time, so the two cannot share devices"
    return None


def _async_abort(s: Setup) -> str | None:
    if s.spec.schedule.mode == "fully-async" and s.spec.schedule.on_weight_update == "abort":
        return "every weight update would throw away the trajectories in flight, of which there are always some"
    return None


def _async_budget(s: Setup) -> str | None:
    budget, size = s.spec.schedule.max_concurrent_samples, s.spec.schedule.group_size
    if budget is not None and budget < size:
        return f"a group of {size} trajectories would never fit into {budget}"
    return None


def _async_buffer(s: Setup) -> str | None:
    pick = s.spec.schedule.buffer
    plain = BoundedBufferOptions().model_dump(mode="json")
    if s.spec.schedule.mode != "fully-async" and (pick.use != "bounded" or {**plain, **pick.options} != plain):
        return "only a fully asynchronous run has a data buffer"
    return None


def _in_place(s: Setup) -> str | None:
    if s.spec.schedule.on_weight_update == "in-place" and not s.provides("engine", "pauses-in-place"):
        return f"the engine `{s.spec.engine.use}` cannot freeze requests over their old KV"
    return None


def uncorrected(spec: RunSpec) -> str | None:
    """A warning for runs that train on data of older weights and neither correct nor measure the effect; otherwise
    None."""
    if spec.schedule.mode == "sync" or spec.corrections or spec.objective.old_logprobs == "rollout":
        return None
    return (
        f"this {spec.schedule.mode} run trains on data of older weights and corrects for nothing: the old policy is "
        "the trainer's own, so the loss clips nothing of it. Watch contract/logprobs/kl_k3 and "
        "contract/versions/s_old_max, or add `corrections: [tis]`, or [metrics-only] to measure the effective sample "
        "size"
    )


ASYNC_CHECKS: tuple[Check, ...] = (
    Check(
        id="MIL204",
        about="Asynchronous runs give trainer and engines devices of their own.",
        path="schedule.mode",
        find=_async_colocated,
        do="set placement.mode: separate, or schedule.mode: sync",
        reads=("placement.mode",),
    ),
    Check(
        id="MIL205",
        about="A fully asynchronous run does not abort requests at a weight update.",
        path="schedule.on_weight_update",
        find=_async_abort,
        do="set schedule.on_weight_update: retract, or in-place",
        reads=("schedule.mode",),
    ),
    Check(
        id="MIL206",
        about="The budget of trajectories in flight holds a whole group.",
        path="schedule.max_concurrent_samples",
        find=_async_budget,
        do="set it to schedule.group_size at least",
        reads=("schedule.group_size",),
    ),
    Check(
        id="MIL207",
        about="Only a fully asynchronous run has a data buffer.",
        path="schedule.buffer",
        find=_async_buffer,
        do="set schedule.mode: fully-async, or remove it",
        reads=("schedule.mode",),
        kinds=("data_buffer",),
    ),
    Check(
        id="MIL208",
        about="Freezing requests for a weight update needs an engine that can.",
        path="schedule.on_weight_update",
        find=_in_place,
        do="set schedule.on_weight_update: retract, or pick an engine that provides `pauses-in-place`",
        kinds=("engine",),
    ),
)
