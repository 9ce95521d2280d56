"""Publishes one weight version, so that it is complete on every engine or visible on none.

    SERVING ─┬─> PAUSING ─> STAGING ─> VERIFYING ────────────┬─> ACTIVATING
             └────────────> STAGING ─> VERIFYING ─> PAUSING ─┘        │
                  REFUSED <─ ROLLING_BACK <─ any of them may fail     │
                                                                      v
             PUBLISHED <─ PROBING <─ RESUMING <─ PROVING <────────────┤
                            any of them may fail ─> SPLIT <───────────┘

The lower path is for engines that stage a version beside the one they serve: they generate until the pause, and only
the swap stops them. Until ACTIVATING, nothing that an engine serves with has changed. So every failure before it ends
in REFUSED, and generation continues. Several engines cannot be activated in one atomic act. If it succeeds on some
only, or if an engine turns out to serve other weights than the trainer's, the update is SPLIT: no engine serves, so
that no group is sampled by mixed or wrong weights, and the run stops.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, Protocol, TypeVar

from miles_core.errors import MilesError, TransportError
from miles_core.kinds.engine import Engine, PauseMode
from miles_core.kinds.transport import Staged, Transport
from miles_core.types import WeightManifest
from miles_core.watch import describe, progress, waiting
from miles_core.weights.digests import compare

T = TypeVar("T")


class Phase(StrEnum):
    """Where a weight update stands."""

    SERVING = "serving"
    PAUSING = "pausing"
    STAGING = "staging"
    VERIFYING = "verifying"
    ACTIVATING = "activating"
    PROVING = "proving"
    RESUMING = "resuming"
    PROBING = "probing"
    PUBLISHED = "published"
    ROLLING_BACK = "rolling back"
    REFUSED = "refused"
    SPLIT = "split"


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.SERVING: frozenset({Phase.PAUSING, Phase.STAGING}),
    Phase.PAUSING: frozenset({Phase.STAGING, Phase.ACTIVATING, Phase.ROLLING_BACK}),
    Phase.STAGING: frozenset({Phase.VERIFYING, Phase.ROLLING_BACK}),
    Phase.VERIFYING: frozenset({Phase.PAUSING, Phase.ACTIVATING, Phase.ROLLING_BACK}),
    Phase.ACTIVATING: frozenset({Phase.PROVING, Phase.ROLLING_BACK, Phase.SPLIT}),
    Phase.PROVING: frozenset({Phase.RESUMING, Phase.SPLIT}),
    Phase.RESUMING: frozenset({Phase.PROBING, Phase.SPLIT}),
    Phase.PROBING: frozenset({Phase.PUBLISHED, Phase.SPLIT}),
    Phase.ROLLING_BACK: frozenset({Phase.REFUSED}),
    Phase.PUBLISHED: frozenset(),
    Phase.REFUSED: frozenset(),
    Phase.SPLIT: frozenset(),
}
PAUSED_PHASES = (Phase.PAUSING, Phase.ACTIVATING, Phase.PROVING, Phase.RESUMING)


class Proof(Protocol):
    """Checks that the engines serve what the trainer has. `weights.proof` implements it."""

    async def weights(self, engines: Sequence[Engine], manifest: WeightManifest) -> Mapping[str, float]:
        """Compare the live weights while the engines are paused. Returns figures of what it cost. Raises
        `ContractError`."""
        ...

    async def logprobs(self, engines: Sequence[Engine], version: int) -> Mapping[str, float]:
        """Let the engines, which were just resumed, score what the trainer can score as well. Raises
        `ContractError`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """How updates are done."""

    overlap: bool = False
    """Whether to stage before the pause; every engine must provide the tag `stages-aside`."""
    timeout_s: float | None = None
    """Seconds that staging, and each answer of an engine, may take; None is no limit."""
    proof: Proof | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """One completed publish."""

    manifest: WeightManifest
    """The manifest of the sender. That of every engine was equal to it."""
    seconds_by_phase: Mapping[str, float]
    """Wall-clock seconds of each phase, in the order in which they were entered."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """``sync/...`` metrics of this update."""
    refused: Mapping[int, str] = field(default_factory=dict)
    """The engines that asked to join and could not, by position, and why."""

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
        self.timeout_s: float | None = None
        self._entered = time.monotonic()

    def enter(self, phase: Phase) -> None:
        """Go to the next phase. A transition that `TRANSITIONS` does not have is a mistake of this module."""
        if phase not in TRANSITIONS[self.phase]:
            raise AssertionError(f"weight update cannot go from {self.phase} to {phase}")
        now = time.monotonic()
        if self.phase is not Phase.SERVING:
            self.seconds[self.phase] = now - self._entered
        self.phase, self._entered = phase, now


async def publish(
    transport: Transport,
    engines: Sequence[Engine],
    version: int,
    settings: UpdateSettings | None = None,
    *,
    mode: PauseMode = "retract",
) -> PublishReport:
    """Make `version` the one that every engine serves.

    Args:
        transport: Already opened with these engines, in this order.
        version: Not below the engines' present one.
        mode: What happens to requests in flight.

    Raises:
        TransportError: the version was refused (all engines serve the old one again) or is split (none serves).
        ContractError: an engine serves other weights than the trainer's; none serves now.
    """
    return await run_update(WeightUpdate(version), transport, engines, settings, mode=mode)


async def run_update(
    update: WeightUpdate,
    transport: Transport,
    engines: Sequence[Engine],
    settings: UpdateSettings | None = None,
    *,
    mode: PauseMode = "retract",
    newcomers: frozenset[int] = frozenset(),
) -> PublishReport:
    """`publish` with the state in the caller's hands.

    Args:
        mode: What happens to requests in flight.
        newcomers: Positions of engines that never served a version of this run; theirs need not agree with the others'.
    """
    settings = settings or UpdateSettings()
    update.timeout_s = settings.timeout_s
    paused = False
    try:
        old = await _served_versions(update, engines, newcomers)
        if settings.overlap:
            staged = await _stage(update, transport, len(engines))
        update.enter(Phase.PAUSING)
        paused = True
        await _all(update, "pause", [partial(engine.pause, mode) for engine in engines])
        if not settings.overlap:
            staged = await _stage(update, transport, len(engines))
        update.enter(Phase.ACTIVATING)
    except BaseException:
        if update.phase is not Phase.SERVING:  # before the first phase nothing has been asked of anybody
            await _roll_back(update, engines if paused else ())
        raise
    # From here a caller that gives up would leave the engines in between; every step is bounded by the time-out.
    figures = await _to_its_end(_switch(update, engines, old, staged.sent, settings.proof))
    update.enter(Phase.PUBLISHED)
    progress()
    return PublishReport(
        manifest=staged.sent,
        seconds_by_phase=dict(update.seconds),
        figures={**_figures(update, staged), **figures},
    )


async def _stage(update: WeightUpdate, transport: Transport, num_engines: int) -> Staged:
    update.enter(Phase.STAGING)
    try:
        async with asyncio.timeout(update.timeout_s):
            staged = await transport.publish(update.version)
    except TimeoutError as error:
        raise TransportError(
            f"version {update.version} was not staged within {update.timeout_s:g} s",
            found=describe(limit=4),
            do="fix what it waits for, or raise weights.timeout_s",
        ) from error
    update.enter(Phase.VERIFYING)
    verify(staged, update.version, num_engines=num_engines)
    return staged


async def _switch(
    update: WeightUpdate, engines: Sequence[Engine], old: Sequence[int], manifest: WeightManifest, proof: Proof | None
) -> Mapping[str, float]:
    """Activate, prove, resume, probe; figures of the proof."""
    figures: dict[str, float] = {}
    await _activate(update, engines, old)
    update.enter(Phase.PROVING)
    try:
        if proof is not None:
            figures.update(await proof.weights(engines, manifest))
        update.enter(Phase.RESUMING)
        await _all(update, "resume", [engine.resume for engine in engines])
        update.enter(Phase.PROBING)
        if proof is not None:
            figures.update(await proof.logprobs(engines, update.version))
    except BaseException:
        update.enter(Phase.SPLIT)
        await _outcomes(update, "pause", [engine.pause for engine in engines])
        raise
    return figures


def _figures(update: WeightUpdate, staged: Staged) -> dict[str, float]:
    seconds = update.seconds
    loads = [received.figures["load_s"] for received in staged.received if "load_s" in received.figures]
    return {
        "sync/wire_bytes": float(staged.sent.num_bytes),
        **{f"sync/{name}": value for name, value in staged.sent.figures.items()},
        "sync/stage_s": seconds[Phase.STAGING],
        "sync/activate_s": seconds[Phase.ACTIVATING],
        "sync/pause_s": sum(seconds.get(phase, 0.0) for phase in PAUSED_PHASES)
        + (0.0 if _staged_first(seconds) else seconds[Phase.STAGING] + seconds[Phase.VERIFYING]),
        "sync/skew_s": max(loads) - min(loads) if loads else 0.0,
    }


def _staged_first(seconds: Mapping[str, float]) -> bool:
    return next(iter(seconds)) == Phase.STAGING


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Finish `work` even if the caller is cancelled, and only then pass the cancellation on."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # the cancellation is what the caller gets; the phase tells the outcome
        raise


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


async def _served_versions(update: WeightUpdate, engines: Sequence[Engine], newcomers: frozenset[int]) -> Sequence[int]:
    """Ask each engine which version it serves. All must serve the same one (-1 before the first publish), except
    newcomers."""
    versions = await _all(update, "version", [engine.version for engine in engines])
    if not versions:
        raise TransportError("there is no engine to publish to", expected="at least one engine", found="none")
    members = {version for index, version in enumerate(versions) if index not in newcomers}
    if len(members) > 1 or (members and update.version < max(members)):
        raise TransportError(
            f"version {update.version} cannot be published",
            expected=f"every engine on one version, at most {update.version}",
            found=", ".join(f"engine {index}: {version}" for index, version in enumerate(versions)),
            do="restart the run with --resume",
        )
    return versions


async def _activate(update: WeightUpdate, engines: Sequence[Engine], old: Sequence[int]) -> None:
    """Swap on all engines, then ask each what it serves. The answers decide, not the absence of errors."""
    version = update.version
    failures = await _outcomes(update, "activate", [partial(engine.activate, version) for engine in engines])
    served = await _outcomes(update, "version", [engine.version for engine in engines])
    if all(found == version for found in served) and not any(isinstance(f, BaseException) for f in failures):
        return
    untouched = list(served) == list(old) and version not in old
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
            do="all engines serve what they served before; fix the engine's failure",
        ) from cause
    update.enter(Phase.SPLIT)
    raise TransportError(
        f"version {version} is active on some engines only",
        expected=f"every engine on version {version}",
        found=found,
        do="no engine was resumed, so nothing was sampled by mixed versions; restart the run with --resume",
    ) from cause


async def _roll_back(update: WeightUpdate, engines: Sequence[Engine]) -> None:
    """Resume the engines that were paused, with the version they had. Afterwards the caller raises the error that led
    here; it also explains a failure to resume."""
    update.enter(Phase.ROLLING_BACK)
    outcomes = await _outcomes(update, "resume", [engine.resume for engine in engines])
    update.enter(Phase.REFUSED)
    stuck = [f"engine {i}: {_brief(o)}" for i, o in enumerate(outcomes) if isinstance(o, BaseException)]
    if stuck:
        raise TransportError(
            f"version {update.version} was refused, and engines did not resume on the old one",
            found="; ".join(stuck),
            do="restart the run with --resume",
        )


async def _all(update: WeightUpdate, verb: str, calls: Iterable[Callable[[], Awaitable[T]]]) -> list[T]:
    """Await one call for each engine to its end. If any failed, raise an error that names every engine that did."""
    outcomes = await _outcomes(update, verb, calls)
    failed = [(index, outcome) for index, outcome in enumerate(outcomes) if isinstance(outcome, BaseException)]
    if failed:
        raise TransportError(
            f"version {update.version} was not published: {verb} failed",
            found="; ".join(f"engine {index}: {_brief(outcome)}" for index, outcome in failed),
            where=", ".join(f"engine {index}" for index, _ in failed),
        ) from failed[0][1]
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


async def _outcomes(
    update: WeightUpdate, verb: str, calls: Iterable[Callable[[], Awaitable[T]]]
) -> list[T | BaseException]:
    async def one(index: int, call: Callable[[], Awaitable[T]]) -> T:
        with waiting(f"publish of version {update.version}", on=f"engine {index}: {verb}"):
            try:
                async with asyncio.timeout(update.timeout_s):
                    return await call()
            except TimeoutError as error:
                raise TransportError(f"{verb} did not end within {update.timeout_s:g} s") from error

    return await asyncio.gather(*(one(index, call) for index, call in enumerate(calls)), return_exceptions=True)


def _brief(outcome: object) -> str:
    if isinstance(outcome, MilesError):
        return outcome.message
    return f"{type(outcome).__name__}: {outcome}" if isinstance(outcome, BaseException) else str(outcome)
