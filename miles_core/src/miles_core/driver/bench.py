"""`miles bench transports`: measures every usable transport between a run-file's own trainer and engines.

The processes are started once. Then each transport connects to them and publishes a few versions. There is an optimizer
step between two versions, so that as much changes as in training. Proofs run as the run-file says, and are timed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from miles_core.config.load import Source
from miles_core.config.model_folder import read_model_folder
from miles_core.config.resolve import ResolvedRun, check_run
from miles_core.driver.assemble import make, update_settings
from miles_core.driver.selfcheck import made_up_batch
from miles_core.driver.settings import choose_device, engine_spec, trainer_spec
from miles_core.errors import ConfigError, MilesError, TransportError
from miles_core.kinds.executor import Executor, Trainer
from miles_core.kinds.transport import Transport
from miles_core.registry import Registry
from miles_core.weights.fleet import Fleet

CLOSE_CALL = 1.1
"""Two pauses within this ratio count as equal: the next run would swap them."""
BATCH_SEQUENCES, BATCH_TOKENS = 4, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was measured of one transport, or why it could not be tried."""

    name: str
    figures: Mapping[str, float]
    """Means over the versions after the first: ``sync/...`` metrics and ``update_s``, the seconds of all phases. Also
    ``host_bytes``, by how much the used memory of this host grew at most; what processes still hold from the transport
    before is not counted. Empty if the transport was not tried."""
    why_not: str = ""


def candidates(
    source: Source, registry: Registry, options: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, ResolvedRun], list[Outcome]]:
    """The run with each transport in turn, and the transports that it cannot use, each with the first reason.

    Args:
        options: The options of each transport that needs some and is not the one that the run-file picks.

    Raises:
        ConfigError: options of a transport that is not installed.
    """
    names = [entry.name for entry in registry.entries("transport")]
    if unknown := sorted(options.keys() - set(names)):
        raise ConfigError(
            f"there is no transport `{unknown[0]}` to give options to",
            expected=f"one of {', '.join(names)}",
            where="--with",
            do="correct the name, or install the distribution that has it",
        )
    usable: dict[str, ResolvedRun] = {}
    refused = []
    own = source.tree.get("transport")
    own_name = own.get("use") if isinstance(own, dict) else own
    for entry in registry.entries("transport"):
        pick: dict[str, Any] = {"use": entry.name, **options.get(entry.name, {})}
        if entry.name == own_name and entry.name not in options and isinstance(own, dict):
            pick = own
        run, problems = check_run(replace(source, tree={**source.tree, "transport": pick}), registry)
        if run is None:
            key = problems[0].path.removeprefix("transport.")
            named = "" if key == problems[0].path else f"{key} "  # the message goes on from the key that it is about
            refused.append(Outcome(name=entry.name, figures={}, why_not=f"{named}{problems[0].message}"))
        else:
            usable[entry.name] = run
    return usable, refused


async def bench_transports(runs: Mapping[str, ResolvedRun], *, versions: int) -> list[Outcome]:
    """Try each transport. If one fails, that is its outcome, and the others are still tried.

    Args:
        runs: The same run with different transports.
        versions: How often each transport publishes after its first time, with an optimizer step before each.
    """
    run = next(iter(runs.values()))
    device = choose_device(run.spec.placement.device)
    executor: Executor = make(run, "executor")
    try:
        trainer = await executor.start_trainer(trainer_spec(run, device))
        engines = await executor.start_engines(engine_spec(run, device))
        outcomes, version = [], -1
        await _step(trainer, 0)  # makes the optimizer's state, which is no transport's memory
        for name, candidate in runs.items():
            transport: Transport = make(candidate, "transport")
            try:
                with host_memory() as memory:
                    await transport.open(trainer, engines)
                    settings = update_settings(candidate, trainer, read_model_folder(Path(run.spec.model.path)))
                    fleet = Fleet(transport, trainer, engines, settings)
                    figures = []
                    for number in range(versions + 1):
                        version += 1
                        await _step(trainer, version)
                        report = await fleet.publish(version)
                        if number:  # the first one also connects
                            figures.append({**report.figures, "update_s": sum(report.seconds_by_phase.values())})
                outcomes.append(Outcome(name=name, figures={**_means(figures), "host_bytes": float(memory[0])}))
            except MilesError as error:
                outcomes.append(Outcome(name=name, figures={}, why_not=error.message))
            finally:
                await transport.close()
        return outcomes
    finally:
        await executor.close()


async def _step(trainer: Trainer, seed: int) -> None:
    await trainer.train_step(made_up_batch(seed=seed, sequences=BATCH_SEQUENCES, length=BATCH_TOKENS))


def _means(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name for each in figures for name in each}
    return {name: sum(each.get(name, 0.0) for each in figures) / len(figures) for name in sorted(names)}


def recommend(outcomes: Sequence[Outcome]) -> tuple[str, str]:
    """The transport to use, and why: the one with the shortest pause, and among equals the one that moves the fewest
    bytes.

    Raises:
        TransportError: none could be tried.
    """
    tried = [outcome for outcome in outcomes if outcome.figures]
    if not tried:
        raise TransportError(
            "no transport works here", found="; ".join(f"{outcome.name}: {outcome.why_not}" for outcome in outcomes)
        )
    shortest = min(outcome.figures["sync/pause_s"] for outcome in tried)
    close = [outcome for outcome in tried if outcome.figures["sync/pause_s"] <= CLOSE_CALL * shortest]
    best = min(close, key=lambda outcome: outcome.figures["sync/wire_bytes"])
    pause = best.figures["sync/pause_s"]
    if len(close) > 1:
        others = ", ".join(outcome.name for outcome in close if outcome is not best)
        return best.name, f"pauses {pause:.3g} s like {others}, and none of them moves fewer bytes"
    if len(tried) == 1:
        return best.name, f"the only one that works here; pauses {pause:.3g} s"
    second = min(outcome.figures["sync/pause_s"] for outcome in tried if outcome is not best)
    return best.name, f"pauses {pause:.3g} s, the next one {second:.3g} s"


@contextlib.contextmanager
def host_memory() -> Iterator[list[int]]:
    """By how many bytes the used memory of the host grew at most, as a list with one item. All processes count."""
    before = _available()
    most, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.02):
            most[0] = max(most[0], before - _available())

    thread = threading.Thread(target=watch, name="miles-host-memory", daemon=True)
    thread.start()
    try:
        yield most
    finally:
        stop.set()
        thread.join()


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
