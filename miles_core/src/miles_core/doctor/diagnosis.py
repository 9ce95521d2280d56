"""From signs to a diagnosis: the most specific ones first, and one cause for one symptom."""

from __future__ import annotations

from dataclasses import dataclass

from miles_core.doctor import outright, signs
from miles_core.doctor.evidence import Evidence, gather
from miles_core.doctor.finding import Finding
from miles_core.report.load import RunRecord
from miles_core.tracking.live import CONTRACTS
from miles_core.tracking.verdict import verdict_of_steps

OUTRIGHT = (
    outright.broken_weights_proof,
    outright.broken_tokens,
    outright.broken_versions,
    outright.no_replay_records,
    outright.other_experts,
)
"""Each measures its contract directly; all that fire are reported."""
FROM_LOGPROBS = (
    signs.shifted,
    signs.temperature,
    signs.cache_outlived,
    signs.weights_differ,
    signs.since_the_first_step,
    signs.promise_of_equality,
    outright.stopped,
    outright.unexplained,
)
"""Explanations of one symptom, the narrowest first: only the first that fits is reported, and none when a direct
measurement explains the symptom already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    findings: tuple[Finding, ...]
    readings: tuple[tuple[str, str], ...]
    """(contract, its figures on the last step)"""
    blind: tuple[str, ...]
    """What this run does not record, so that nothing can be said of it."""
    steps: int
    """Recorded; the diagnosis is of these."""
    planned: int
    cut_short: str | None = None
    """Where the run ended, in words; None if it came to its end."""
    state: str | None = None
    """Of an asynchronous run: which side waits for which, in words."""

    @property
    def healthy(self) -> bool:
        return not self.findings


def diagnose(record: RunRecord) -> Diagnosis:
    """Read a run and say what is wrong with it."""
    evidence = gather(record)
    findings = [finding for sign in OUTRIGHT if (finding := sign(evidence)) is not None]
    if not findings:
        inferred = (sign(evidence) for sign in FROM_LOGPROBS)  # lazily: the last one may load a model
        first = next((finding for finding in inferred if finding is not None), None)
        findings = [] if first is None else [first]
    readings = tuple((name, record.reading(name, record.steps)) for name in CONTRACTS)
    found = verdict_of_steps(record.metrics, record.timings)
    state = None if found is None else f"{found.verdict}: {found.sentence}"
    return Diagnosis(
        findings=tuple(findings),
        readings=readings,
        blind=_blind(evidence),
        steps=record.steps,
        planned=record.planned,
        cut_short=record.cut_short,
        state=state,
    )


def _blind(evidence: Evidence) -> tuple[str, ...]:
    found = []
    if not evidence.record.metrics and not evidence.steps:
        found.append("no step was recorded")
    if evidence.setting("objective.old_logprobs") == "rollout":
        found.append("log-probs: the run takes the engine's as old policy, so the two sides are never compared")
    elif not evidence.steps and evidence.record.metrics:
        found.append("log-probs by token: no rollouts were written; set tracking.rollouts_every_steps")
    elif evidence.steps and evidence.steps[0].step != 1 and signs.baseline(evidence) is None:
        found.append("weight delivery: the first step's rollouts are gone, and with them what rounding alone does")
    if evidence.unreadable:
        found.append(f"rollouts of steps {', '.join(map(str, evidence.unreadable))}: the files are damaged")
    if evidence.setting("rollout.routes") == "off" and evidence.has_experts:
        found.append("routes: not recorded; rollout.routes: record compares the experts of both sides")
    return tuple(found)
