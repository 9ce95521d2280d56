"""What a run says itself: refused updates, contracts that it found broken, and what stopped it. Pure."""

from __future__ import annotations

import re

from miles_core.contracts.logprobs import MAX_MEAN_ABS_DIFF
from miles_core.contracts.routes import MAX_DIFFERENT_FRACTION
from miles_core.doctor.evidence import Evidence
from miles_core.doctor.finding import Finding


def broken_weights_proof(evidence: Evidence) -> Finding | None:
    """An update was refused because the live weights, or what they sample, were not the trainer's."""
    for event in evidence.of("error"):
        message = str(event.get("message", ""))
        found = re.search(r"engines do not (serve|sample with) version (\d+)", message)
        if event.get("type") == "ContractError" and found:
            what = "hold other weights" if found[1] == "serve" else "sample otherwise than their weights say"
            return Finding(
                contract="versions",
                cause="weights not delivered" if found[1] == "serve" else "cache outlived its weights",
                since=int(found[2]),
                says=f"Engines that claim weight version {found[2]} {what}; the run was stopped there.",
                evidence=(_line(message, "found"),),
                try_=("look at how the engine loads the tensors named, and flushes its caches on `activate`",),
            )
    return None


def broken_versions(evidence: Evidence) -> Finding | None:
    """Tokens carry a version that was never published, or one that is too old."""
    for event in evidence.of("contract_broken"):
        if event.get("contract") == "versions":
            offenders = tuple(map(str, event.get("offenders", ())))
            never = any("never published" in offender for offender in offenders)
            return Finding(
                contract="versions",
                cause="wrong version label" if never else "too old",
                since=int(event["step"]),
                says="Tokens name a weight version that "
                + ("was never published." if never else "is older than the run allows."),
                evidence=offenders[:3],
                try_=(
                    ("check the `weight_version` the engine puts on its chunks",)
                    if never
                    else ("check the labels; if they are right, lower the number of groups in flight",)
                ),
            )
    return None


def broken_tokens(evidence: Evidence) -> Finding | None:
    """Rows broke the tokens contract, or changed between rollout and trainer."""
    for event in evidence.of("contract_broken"):
        if event.get("contract") == "tokens":
            return Finding(
                contract="tokens",
                cause="rows changed",
                since=int(event["step"]),
                says="The rows that reached the trainer are not those that were sampled.",
                evidence=tuple(map(str, event.get("offenders", ())))[:3],
                try_=("report the session or engine that built the rows named",),
            )
    return None


def other_experts(evidence: Evidence) -> Finding | None:
    """The engine's experts are not those the trainer's router picks."""
    record = evidence.record
    series = record.series("contract/routes/own_different_fraction")
    # A router that has learnt since picks other experts for old tokens: no fault.
    aged = {step for step, fraction in record.series("contract/logprobs/fresh_fraction") if fraction < 1}
    over = [(step, value) for step, value in series if value > MAX_DIFFERENT_FRACTION and step not in aged]
    forced = [(step, value) for step, value in record.series("contract/routes/different_fraction") if value > 0]
    replaying = evidence.setting("rollout.routes") == "replay"
    if replaying and forced:
        return Finding(
            contract="routes",
            cause="replay not obeyed",
            since=forced[0][0],
            says="Replay is on, and tokens were still sent to other experts than recorded.",
            evidence=(f"step {forced[0][0]}: {forced[0][1]:.2%} of (token, layer) pairs",),
            try_=("report the backend",),
        )
    if not over:
        return None
    return Finding(
        contract="routes",
        cause="router differs",
        since=over[0][0],
        says="Engine and trainer route tokens to different experts far more often than rounding explains.",
        evidence=(
            f"step {over[0][0]}: the trainer's router picks another set for {over[0][1]:.1%} of (token, layer) pairs; "
            f"{MAX_DIFFERENT_FRACTION:.0%} is allowed",
            f"largest on any step: {max(value for _, value in over):.1%}",
        ),
        try_=(
            "compare the router's weights, bias and score function on both sides; are router tensors published?",
            "rollout.routes: replay hides the effect on the loss, not the cause",
        ),
    )


def no_replay_records(evidence: Evidence) -> Finding | None:
    """Routes are on and the engine returned none."""
    for event in evidence.of("contract_broken"):
        offenders = tuple(map(str, event.get("offenders", ())))
        if event.get("contract") == "routes" and not any("(token, layer) pairs" in each for each in offenders):
            return Finding(
                contract="routes",
                cause="bad records",
                since=int(event["step"]),
                says="The recorded routes cannot be those of this model's tokens.",
                evidence=offenders[:3],
                try_=("compare the checkpoints both sides serve; look at the engine's route payload",),
            )
    return None


_NAMED = re.compile(r"\b(token|route|version|logprob)s?\b|old_(logprob)s|ref_(logprob)s|(weight)s after publishing")


def stopped(evidence: Evidence) -> Finding | None:
    """A broken contract ended the run before anything else could be recorded of it."""
    for event in evidence.of("error"):
        message = str(event.get("message", ""))
        if event.get("type") != "ContractError":
            continue
        named = _NAMED.search(message.splitlines()[0])
        which = next(filter(None, named.groups())) if named else "token"
        return Finding(
            contract="versions" if which == "weight" else f"{which}s",
            cause="stopped the run",
            since=evidence.record.steps + 1,
            says=f"The run was stopped: {message.splitlines()[0]}.",
            evidence=(_line(message, "found"),),
            try_=(_line(message, "do"),),
        )
    return None


def unexplained(evidence: Evidence) -> Finding | None:
    """The run measured that the log-probs are broken, and no fingerprint says why."""
    said = {int(event["step"]) for event in evidence.of("contract_broken") if event.get("contract") == "logprobs"}
    series = evidence.record.series("contract/logprobs/abs_diff_mean_fresh")
    said |= {step for step, mean in series if mean > MAX_MEAN_ABS_DIFF}
    if not said:
        return None
    since, worst = min(said), max(series, key=lambda pair: pair[1], default=None)
    return Finding(
        contract="logprobs",
        cause="unexplained",
        since=since,
        says="Engine and trainer give the same tokens other log-probs; what was recorded does not tell why.",
        evidence=(
            f"broken on {len(said)} of {evidence.record.steps} steps",
            *(
                (f"step {worst[0]}: mean |difference| {worst[1]:.3g} nats; {MAX_MEAN_ABS_DIFF:g} is allowed",)
                if worst
                else ()
            ),
        ),
        try_=(
            "write the rollouts of every step, the first one included: tracking.rollouts_every_steps: 1",
            "set weights.verify: always, to rule out weights that were not delivered",
        ),
    )


def _line(message: str, part: str) -> str:
    """The text after ``part:`` in an error's message, or its first line."""
    found = re.search(rf"^\s*{part}:\s*(.+)$", message, re.MULTILINE)
    return found[1] if found else message.splitlines()[0]
