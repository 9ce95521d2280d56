"""What `precision.true_on_policy` demands of the rest of a run-file: it never runs with part of its promise."""

from __future__ import annotations

from typing import Literal

from miles_core.config.checks import Check, Setup
from miles_core.numerics.profiles import find_profile, listing


def _profile(s: Setup) -> str | None:
    if not s.spec.precision.true_on_policy or s.model is None:
        return None
    found = find_profile(s.model.config)
    if isinstance(found, str):
        return f"registered are {listing()}; {found}"
    kind: Literal["cpu", "cuda"] = "cuda" if s.spec.placement.device == "cuda" else "cpu"
    if unproven := sorted(set(s.model.dtypes) - set(found.proven[kind])):
        return f"profile {found.name} is proven on {kind} in {' and '.join(found.proven[kind])}, not in {unproven[0]}"
    if len(s.model.dtypes) > 1:
        return f"the checkpoint mixes {' and '.join(sorted(s.model.dtypes))}; profiles are proven in one dtype"
    return None


def _same_kernels(s: Setup) -> str | None:
    if s.spec.precision.true_on_policy:
        for kind, pick in (("engine", s.spec.engine), ("backend", s.spec.backend)):
            if not s.provides(kind, "true-on-policy"):
                return f"the {kind} `{pick.use}` does not compute with the shared kernels"
    return None


def _unmeasured(s: Setup) -> str | None:
    if s.spec.precision.true_on_policy and s.spec.objective.old_logprobs == "rollout":
        return "the difference between the two sides would not be measured, so nobody would know that it is 0"
    return None


def _old_keys(s: Setup) -> str | None:
    if s.spec.precision.true_on_policy and s.spec.schedule.on_weight_update == "in-place":
        return "a token sampled over key-values of older weights has a log-prob that no one version gives"
    return None


def _never_fresh(s: Setup) -> str | None:
    if s.spec.precision.true_on_policy and s.spec.schedule.update_weights_interval > 1:
        return (
            "between updates the trainer's weights are ahead of every engine's, so no token has its sampler to compare"
        )
    return None


TRUE_ON_POLICY: tuple[Check, ...] = (
    Check(
        id="MIL801",
        about="True-on-policy is for registered models.",
        path="precision.true_on_policy",
        find=_profile,
        do="set precision.true_on_policy: false and bound the difference with a correction, or take a registered model",
        reads=("model", "placement.device"),
    ),
    Check(
        id="MIL802",
        about="True-on-policy needs an engine and a backend that share the kernels.",
        path="precision.true_on_policy",
        find=_same_kernels,
        do="set precision.true_on_policy: false, or pick an engine and a backend that provide `true-on-policy`",
        kinds=("engine", "backend"),
    ),
    Check(
        id="MIL803",
        about="True-on-policy is measured on every step.",
        path="objective.old_logprobs",
        find=_unmeasured,
        do="set objective.old_logprobs: trainer, or precision.true_on_policy: false",
        reads=("precision.true_on_policy",),
    ),
    Check(
        id="MIL804",
        about="True-on-policy tokens are sampled over key-values of their own weights.",
        path="schedule.on_weight_update",
        find=_old_keys,
        do="set schedule.on_weight_update: retract, or precision.true_on_policy: false",
        reads=("precision.true_on_policy",),
    ),
    Check(
        id="MIL805",
        about="True-on-policy publishes every version that is scored with.",
        path="schedule.update_weights_interval",
        find=_never_fresh,
        do="set schedule.update_weights_interval: 1, or precision.true_on_policy: false",
        reads=("precision.true_on_policy", "schedule.mode"),
    ),
)
