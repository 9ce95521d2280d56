"""Signs: each looks for the fingerprint of one kind of fault and returns a finding, or None. Pure.

Most faults show as a difference between the two sides' log-probs. What tells them apart is *where*: since the first
step, when both sides hold the checkpoint, or since the first update; everywhere, or where a line, a shift, a cache or
a router explains it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from miles_core.contracts.logprobs import MAX_MEAN_ABS_DIFF
from miles_core.doctor.evidence import Evidence, StepTokens
from miles_core.doctor.finding import Finding
from miles_core.doctor.rescore import Rescored, rescore

MIN_TOKENS = 16
"""Fewer tokens carry no fingerprint."""
FLOOR = 1e-3
"""Nats of mean difference that rounding explains in any precision."""
GROWTH = 10.0
"""Times the first step's difference that rounding does not grow to, though logits sharpen."""
SHIFT_GAIN = 0.2
"""A shift explains the differences when it leaves at most this part of them."""
LINE_GAIN = 0.4
"""The same for a line through (engine, trainer) log-probs."""
MIN_SLOPE = 0.08
"""Distance of the line's slope from 1 that means another temperature."""


# --- from the log-probs, on both sides of the first update -----------------------------------------------------------


def shifted(evidence: Evidence) -> Finding | None:
    """The engine's log-probs belong to the token before or after."""

    def explained(step: StepTokens) -> str | None:
        for shift in (1, -1):
            left, apart, together = _shifted(step, shift)
            if left >= MIN_TOKENS and apart > FLOOR and together <= SHIFT_GAIN * apart:
                side = "following" if shift == 1 else "preceding"
                return (
                    f"step {step.step}: mean |difference| {apart:.3g} nats as recorded, {together:.3g} against the "
                    f"trainer's log-prob of the {side} token"
                )
        return None

    return _first(
        evidence,
        explained,
        contract="logprobs",
        cause="shifted log-probs",
        says="The engine's log-probs are off by one position.",
        try_=(
            "count the entries: does the engine's list begin with the prompt's last token, or lack its first output?",
        ),
    )


def temperature(evidence: Evidence) -> Finding | None:
    """The engine's log-probs lie on a line against the trainer's, of another slope than 1, since the first step: a
    trainer whose policy sharpens while the engine keeps old weights draws a line too, later."""
    if evidence.steps and evidence.steps[0].step == 1 and _on_the_diagonal(evidence.steps[0].fresh):
        return None

    def explained(step: StepTokens) -> str | None:
        if step.rollout.size < MIN_TOKENS or step.rollout.std() == 0:
            return None
        slope, offset = np.polyfit(step.rollout, step.trainer, 1)
        left = float(np.abs(step.trainer - slope * step.rollout - offset).mean())
        straight = float(np.corrcoef(step.rollout, step.trainer)[0, 1]) ** 2
        # Noise on either side also lowers a slope; it lowers the correlation with it.
        if step.mean_abs < MAX_MEAN_ABS_DIFF / 4 or left > LINE_GAIN * step.mean_abs or straight < 0.9:
            return None
        if abs(slope - 1) < MIN_SLOPE:
            return None
        return (
            f"step {step.step}: trainer = {slope:.2f} x engine {offset:+.2f} leaves {left:.3g} of {step.mean_abs:.3g} "
            f"nats unexplained (correlation {straight:.3f})"
        )

    return _first(
        evidence,
        explained,
        contract="logprobs",
        cause="temperature",
        says="The two sides scale logits by different temperatures.",
        try_=(
            "check that the engine returns log-probs of the temperature-scaled policy, before top-p and top-k",
            f"the run samples at temperature {evidence.setting('rollout.sampling.temperature')}",
        ),
    )


def cache_outlived(evidence: Evidence) -> Finding | None:
    """After an update, even the first request of a step reused key-values, and the log-probs changed."""
    base = baseline(evidence)
    if base is None or evidence.setting("schedule.mode") not in (None, "sync"):
        return None  # without a pause between steps, somebody's cache is always warm
    for step in evidence.steps:
        fresh = step.fresh
        known = [count for count in step.cached if count is not None]
        if step.step > 1 and known and min(known) > 0 and _grown(fresh, base):
            return Finding(
                contract="versions",
                cause="cache outlived its weights",
                since=step.step,
                says="Key-values of older weights were continued after an update.",
                evidence=(
                    f"step {step.step}: every one of {len(known)} trajectories reused prompt tokens, at least "
                    f"{min(known)}, though the weights had just changed",
                    f"mean |difference| {fresh.mean_abs:.3g} nats, {base:.3g} on the first step",
                ),
                try_=("flush the prefix cache on every `activate`; set weights.probes to have updates proved",),
            )
    return None


def weights_differ(evidence: Evidence) -> Finding | None:
    """The sides agreed while both held the checkpoint, and no longer do since an update."""
    base = baseline(evidence)
    if base is None:
        return None
    for step in evidence.steps:
        fresh = step.fresh
        if step.step == 1 or not _grown(fresh, base):
            continue
        later = [
            other.fresh.mean_abs for other in evidence.steps if other.step >= step.step and other.fresh.rollout.size
        ]
        growing = len(later) >= 3 and later[-1] > 2 * later[0]
        return Finding(
            contract="versions",
            cause="weights not delivered",
            since=step.step,
            says="The engine does not sample with the weights that its tokens' version names"
            + ("; the gap grows with every update." if growing else "."),
            evidence=(
                f"mean |difference| {base:.3g} nats on step 1, {fresh.mean_abs:.3g} on step {step.step}, after the "
                "first updates",
                f"on fresh tokens alone, {fresh.rollout.size} of {step.rollout.size}",
            ),
            try_=(
                "set weights.verify: always, which compares every tensor after each update",
                "a constant gap points to an engine one version behind, a growing one to tensors never updated",
            ),
        )
    return None


# --- from the log-probs, since the first step -------------------------------------------------------------------------


def promise_of_equality(evidence: Evidence) -> Finding | None:
    """True-on-policy is on, and a fresh token differs."""
    if not evidence.setting("precision.true_on_policy"):
        return None
    differs = [(step, v) for step, v in evidence.record.series("contract/logprobs/abs_diff_max_fresh") if v > 0]
    if not differs:
        return None
    step, largest = differs[0]
    return Finding(
        contract="logprobs",
        cause="true-on-policy not kept",
        since=step,
        says="Engine and trainer promise identical log-probs and give different ones.",
        evidence=(f"step {step}: up to {largest:.3g} nats on fresh tokens, 0 is promised",),
        try_=("report it with the model's shape, device and dtype; or continue with precision.true_on_policy: false",),
    )


def since_the_first_step(evidence: Evidence) -> Finding | None:
    """A large difference while both sides hold the checkpoint, which nothing above explains: ask the checkpoint."""
    if not evidence.steps or evidence.steps[0].step != 1:
        return None  # later the two sides need not hold the same weights
    step = evidence.steps[0].fresh
    if step.rollout.size < MIN_TOKENS or step.mean_abs <= MAX_MEAN_ABS_DIFF:
        return None
    seen = f"step {step.step}: mean |difference| {step.mean_abs:.3g} nats; {MAX_MEAN_ABS_DIFF:g} is allowed"
    third = rescore(evidence)
    if third is not None and (form := third.read) is not None:
        return Finding(
            contract="tokens",
            cause="other prompt",
            since=step.step,
            says="The engine read another prompt than the row that was trained.",
            evidence=(
                seen,
                f"the checkpoint reproduces the engine's log-probs to {third.by_prompt[form]:.2g} nats when the prompt "
                f"is {form}, and to {third.engine:.2g} as the row has it",
            ),
            try_=(
                "send token ids to the engine, never text, and let nothing add or drop special tokens",
                "compare the prompt ids that the engine reports with the row: miles inspect RUN --sample 0",
            ),
        )
    return Finding(
        contract="logprobs",
        cause="numerics",
        since=step.step,
        says="The two sides give the same tokens other log-probs with the same weights.",
        evidence=(seen, *_third_party(third)),
        try_=(
            *_ask_for_routes(evidence),
            "compare dtypes and attention of both sides; do both load the same checkpoint?",
            "bound what remains: corrections: [tis]",
        ),
    )


def _third_party(third: Rescored | None) -> tuple[str, ...]:
    if third is None:
        return ()
    wrong = "the engine" if third.engine > third.trainer else "the trainer"
    return (
        f"against the checkpoint itself the engine is {third.engine:.2g} nats off, the trainer {third.trainer:.2g}: "
        f"look at {wrong}",
    )


def _ask_for_routes(evidence: Evidence) -> tuple[str, ...]:
    unrecorded = evidence.setting("rollout.routes") == "off" and evidence.has_experts
    return ("this model has experts: set rollout.routes: record, and see whether they agree",) if unrecorded else ()


# --- parts ------------------------------------------------------------------------------------------------------------


def _first(
    evidence: Evidence,
    explained: Callable[[StepTokens], str | None],
    *,
    contract: str,
    cause: str,
    says: str,
    try_: tuple[str, ...],
) -> Finding | None:
    """A finding on the first step that `explained` explains, when it explains most of those that differ at all."""
    texts = [(step.step, explained(step.fresh)) for step in evidence.steps]
    found = [(step, text) for step, text in texts if text is not None]
    differing = [step for step in evidence.steps if step.fresh.rollout.size and step.fresh.mean_abs > FLOOR]
    if not found or 2 * len(found) < len(differing):
        return None
    lines = tuple(text for _, text in (found[0], found[-1])) if len(found) > 1 else (found[0][1],)
    return Finding(
        contract=contract, cause=cause, since=found[0][0], says=says, evidence=tuple(map(str, lines)), try_=try_
    )


def _shifted(step: StepTokens, shift: int) -> tuple[int, float, float]:
    """(pairs, mean |difference| in place, mean |difference| of engine at i and trainer at i + shift) within rows."""
    a, b = (slice(None, -1), slice(1, None)) if shift == 1 else (slice(1, None), slice(None, -1))
    if step.rollout.size < 2:
        return 0, 0.0, 0.0
    same = (step.row[a] == step.row[b]) & (np.abs(step.place[a] - step.place[b]) == 1)
    if not same.any():
        return 0, 0.0, 0.0
    apart = np.abs(step.rollout[a] - step.trainer[a])[same]
    together = np.abs(step.rollout[a] - step.trainer[b])[same]
    return int(same.sum()), float(apart.mean()), float(together.mean())


def _on_the_diagonal(step: StepTokens) -> bool:
    """Whether engine and trainer scale alike on a step."""
    if step.rollout.size < MIN_TOKENS or step.rollout.std() == 0:
        return False
    return bool(abs(np.polyfit(step.rollout, step.trainer, 1)[0] - 1) < MIN_SLOPE / 2)


def baseline(evidence: Evidence) -> float | None:
    """Mean |difference| of the first step, before any update, when both sides agreed on it: of its tokens, or as its
    metrics have it where the rollouts of that step were not written."""
    if evidence.steps and evidence.steps[0].step == 1:
        first = evidence.steps[0].fresh
        found = first.mean_abs if first.rollout.size >= MIN_TOKENS else None
    else:
        found = evidence.record.at(1).get("contract/logprobs/abs_diff_mean_fresh")
    return found if found is not None and found <= MAX_MEAN_ABS_DIFF else None


def _grown(step: StepTokens, base: float) -> bool:
    return step.rollout.size >= MIN_TOKENS and step.mean_abs > max(FLOOR, GROWTH * base)
