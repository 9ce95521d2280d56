"""Publish one weight version: pause, stage, verify, activate, resume; complete on every engine or visible on none.

    SERVING ──> PAUSING ──> STAGING ──> VERIFYING ──> ACTIVATING ──> RESUMING ──> PUBLISHED
                   └───────────┴────────────┴─────────────┤              └─────┐
                                     REFUSED <── ROLLING_BACK                  ├──> SPLIT
                                                          └────────────────────┘

Until ACTIVATING nothing that an engine serves with has changed, so every failure before it ends in REFUSED with
generation running again. Activation on several engines cannot be one atomic act; when it succeeds on some only, the
update is SPLIT: no engine is resumed, so that no group can be sampled by two versions, and the run stops.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from miles_core.errors import MilesError, TransportError
from miles_core.kinds.engine import Engine, PauseMode
from miles_core.kinds.transport import Staged, Transport
from miles_core.types import WeightManifest
from miles_core.watch import progress, waiting
from miles_core.weights.digests import compare

T = TypeVar("T")


class Phase(StrEnum):
    """Where a weight update stands."""

    SERVING = "serving"
    PAUSING = "pausing"
    STAGING = "staging"
    VERIFYING = "verifying"
    ACTIVATING = "activating"
    RESUMING = "resuming"
    PUBLISHED = "published"
    ROLLING_BACK = "rolling back"
    REFUSED = "refused"
    SPLIT = "split"


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.SERVING: frozenset({Phase.PAUSING}),
    Phase.PAUSING: frozenset({Phase.STAGING, Phase.ROLLING_BACK}),
    Phase.STAGING: frozenset({Phase.VERIFYING, Phase.ROLLING_BACK}),
    Phase.VERIFYING: frozenset({Phase.ACTIVATING, Phase.ROLLING_BACK}),
    Phase.ACTIVATING: frozenset({Phase.RESUMING, Phase.ROLLING_BACK, Phase.SPLIT}),
    Phase.RESUMING: frozenset({Phase.PUBLISHED, Phase.SPLIT}),
    Phase.ROLLING_BACK: frozenset({Phase.REFUSED}),
    Phase.PUBLISHED: frozenset(),
    Phase.REFUSED: frozenset(),
    Phase.SPLIT: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """One completed publish."""

    manifest: WeightManifest
    """The sender's; every engine's was equal to it."""
    seconds_by_phase: Mapping[str, float]
    """Wall seconds of pausing, staging, verifying, activating and resuming."""

    @property
    def version(self) -> int:
        return self.manifest.version

    @property
    def num_tensors(self) -> int:
        return len(self.manifest.digests)

    @property
    def num_bytes(self) -> int:
        return self.manifest.num_bytes


class WeightUpdate:
    """The life of one update: its phase, and how long each phase took."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.phase = Phase.SERVING
        self.seconds: dict[str, float] = {}
        self._entered = time.monotonic()

    def enter(self, phase: Phase) -> None:
        """Move on; an edge that `TRANSITIONS` does not have is a mistake of this module."""
        if phase not in TRANSITIONS[self.phase]:
            raise AssertionError(f"weight update cannot go from {self.phase} to {phase}")
        now = time.monotonic()
        if self.phase is not Phase.SERVING:
            self.seconds[self.phase] = now - self._entered
        self.phase, self._entered = phase, now


async def publish(
    transport: Transport, engines: Sequence[Engine], version: int, *, mode: PauseMode = "retract"
) -> PublishReport:
    """Make `version` the one that every engine serves.

    Args:
        transport: Already opened with these engines, in this order.
        version: Not below the engines' present one.
        mode: What happens to requests in flight.

    Raises:
        TransportError: the version was refused (all engines serve the old one again) or is split (none serves).
    """
    return await run_update(WeightUpdate(version), transport, engines, mode=mode)


async def run_update(
    update: WeightUpdate, transport: Transport, engines: Sequence[Engine], *, mode: PauseMode = "retract"
) -> PublishReport:
    """`publish` with the state in the caller's hands."""
    version = update.version
    update.enter(Phase.PAUSING)
    try:
        await _all(update, "pause", [engine.pause(mode) for engine in engines])
        old = await _served_version(update, engines)
        update.enter(Phase.STAGING)
        staged = await transport.publish(version)
        update.enter(Phase.VERIFYING)
        verify(staged, version, num_engines=len(engines))
        update.enter(Phase.ACTIVATING)
    except BaseException:
        await _roll_back(update, engines)
        raise
    await _activate(update, engines, old)
    update.enter(Phase.RESUMING)
    try:
        await _all(update, "resume", [engine.resume() for engine in engines])
    except BaseException:
        update.enter(Phase.SPLIT)
        raise
    update.enter(Phase.PUBLISHED)
    progress()
    return PublishReport(manifest=staged.sent, seconds_by_phase=dict(update.seconds))


def verify(staged: Staged, version: int, *, num_engines: int) -> None:
    """Compare every engine's account of what it staged with what the trainer sent.

    Raises:
        TransportError: naming engines and tensors that differ.
    """
    problems: list[str] = []
    if len(staged.received) != num_engines:
        problems.append(f"{len(staged.received)} engines accounted for it, {num_engines} are there")
    if not staged.sent.digests:
        problems.append("the trainer sent no tensor")
    if staged.sent.version != version:
        problems.append(f"the trainer sent version {staged.sent.version}")
    for index, received in enumerate(staged.received):
        if received.version != version:
            problems.append(f"engine {index} staged version {received.version}")
        difference = compare(staged.sent.digests, received.digests)
        if difference:
            problems.append(f"engine {index}: {difference}")
    if problems:
        raise TransportError(
            f"version {version} did not arrive as it was sent",
            expected=f"{len(staged.sent.digests)} tensors, bit for bit, on each of {num_engines} engines",
            found="; ".join(problems),
            do="report the transport; the engines keep serving the version they had",
        )


async def _served_version(update: WeightUpdate, engines: Sequence[Engine]) -> int:
    """The one version all engines serve; -1 before the first publish."""
    versions = await _all(update, "version", [engine.version() for engine in engines])
    if not versions:
        raise TransportError("there is no engine to publish to", expected="at least one engine", found="none")
    if len(set(versions)) > 1 or update.version < versions[0]:
        raise TransportError(
            f"version {update.version} cannot be published",
            expected=f"every engine on one version, at most {update.version}",
            found=", ".join(f"engine {index}: {version}" for index, version in enumerate(versions)),
            do="restart the run with --resume",
        )
    return versions[0]


async def _activate(update: WeightUpdate, engines: Sequence[Engine], old: int) -> None:
    """Swap on all engines, then ask each what it serves: the answers, not the absence of errors, decide."""
    version = update.version
    failures = await _outcomes(update, "activate", [engine.activate(version) for engine in engines])
    served = await _outcomes(update, "version", [engine.version() for engine in engines])
    if all(found == version for found in served) and not any(isinstance(f, BaseException) for f in failures):
        return
    untouched = all(found == old for found in served) and old != version
    found = "; ".join(
        f"engine {index}: " + (_brief(failure) if isinstance(failure, BaseException) else f"serves {_brief(now)}")
        for index, (failure, now) in enumerate(zip(failures, served, strict=True))
    )
    cause = next((f for f in (*failures, *served) if isinstance(f, BaseException)), None)
    if untouched:
        await _roll_back(update, engines)
        raise TransportError(
            f"version {version} could not be activated",
            found=found,
            do=f"all engines serve version {old} again; mend the engine's failure",
        ) from cause
    update.enter(Phase.SPLIT)
    raise TransportError(
        f"version {version} is active on some engines only",
        expected=f"every engine on version {version}",
        found=found,
        do="no engine was resumed, so nothing was sampled by mixed versions; restart the run with --resume",
    ) from cause


async def _roll_back(update: WeightUpdate, engines: Sequence[Engine]) -> None:
    """Resume what was paused, on the version it had; the error in flight follows, or explains a failure to resume."""
    update.enter(Phase.ROLLING_BACK)
    outcomes = await _outcomes(update, "resume", [engine.resume() for engine in engines])
    update.enter(Phase.REFUSED)
    stuck = [f"engine {i}: {_brief(o)}" for i, o in enumerate(outcomes) if isinstance(o, BaseException)]
    if stuck:
        raise TransportError(
            f"version {update.version} was refused, and engines did not resume on the old one",
            found="; ".join(stuck),
            do="restart the run with --resume",
        )


async def _all(update: WeightUpdate, verb: str, calls: Iterable[Awaitable[T]]) -> list[T]:
    """Await one call per engine to its end; raise when any failed, naming every engine that did."""
    outcomes = await _outcomes(update, verb, calls)
    failed = [(index, outcome) for index, outcome in enumerate(outcomes) if isinstance(outcome, BaseException)]
    if failed:
        raise TransportError(
            f"version {update.version} was not published: {verb} failed",
            found="; ".join(f"engine {index}: {_brief(outcome)}" for index, outcome in failed),
            where=", ".join(f"engine {index}" for index, _ in failed),
        ) from failed[0][1]
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


async def _outcomes(update: WeightUpdate, verb: str, calls: Iterable[Awaitable[T]]) -> list[T | BaseException]:
    async def one(index: int, call: Awaitable[T]) -> T:
        with waiting(f"publish of version {update.version}", on=f"engine {index}: {verb}"):
            return await call

    return await asyncio.gather(*(one(index, call) for index, call in enumerate(calls)), return_exceptions=True)


def _brief(outcome: object) -> str:
    if isinstance(outcome, MilesError):
        return outcome.message
    return f"{type(outcome).__name__}: {outcome}" if isinstance(outcome, BaseException) else str(outcome)
