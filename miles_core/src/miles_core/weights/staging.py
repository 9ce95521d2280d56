"""Stages one version on every engine: one send and all receives run together, and the first failure ends them all.

Every transport's `publish` uses this between its own preparations and clean-up. Nothing here waits for a party that was
waiting for one that failed: the transport's `abandon` unblocks both ends, so the failure is reported at once and by
name.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from miles_core.errors import MilesError, TransportError
from miles_core.kinds.engine import Engine
from miles_core.kinds.transport import Staged, WeightSource
from miles_core.types import WeightManifest
from miles_core.watch import progress, waiting

GRACE_S = 5.0
"""How long the parties of an abandoned publish may take to notice."""


async def stage(
    source: WeightSource, engines: Sequence[Engine], version: int, *, abandon: Callable[[str], None]
) -> Staged:
    """Run the send and all receives of `version` to their ends.

    Args:
        abandon: Tells both ends that this attempt is over, and why. It is called from the event loop, must not block,
            and must make every blocked `send` and `receive` raise soon.

    Raises:
        TransportError: names every party that failed, the first cause first.
    """
    names = ["trainer", *(f"engine {index}" for index in range(len(engines)))]
    calls = [source.send_weights(version), *(engine.receive(version) for engine in engines)]
    tasks = [asyncio.create_task(_watched(name, version, call)) for name, call in zip(names, calls, strict=True)]
    failed: list[str] = []  # names in the order of failure: the first one is the cause, the rest mostly its echo

    def note(task: asyncio.Task[WeightManifest]) -> None:
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            name = names[tasks.index(task)]
            failed.append(name)
            if len(failed) == 1:
                abandon(f"{name} failed: {_one_line(error)}")

    for task in tasks:
        task.add_done_callback(note)
    try:
        await asyncio.wait(tasks)
    except asyncio.CancelledError:
        abandon("the publish was cancelled")
        _, stuck = await asyncio.wait(tasks, timeout=GRACE_S)
        for task in stuck:  # a party that is stopped hears nothing; whoever gave up must not wait for it
            task.cancel()
        raise
    if failed:
        outcomes = {name: task.exception() for name, task in zip(names, tasks, strict=True) if not task.cancelled()}
        first = outcomes.get(failed[0])
        told = first if isinstance(first, MilesError) else MilesError("")
        raise TransportError(
            f"version {version} was not staged on every engine, and all keep serving the one they had",
            found="; then ".join(f"{name}: {_one_line(outcomes.get(name))}" for name in failed),
            where=", ".join(part for part in (failed[0], told.where) if part),
            do=told.do or "fix the first failure and publish again",
        ) from first
    sent, *received = (task.result() for task in tasks)
    return Staged(sent=sent, received=tuple(received))


async def _watched(name: str, version: int, call: Coroutine[Any, Any, WeightManifest]) -> WeightManifest:
    verb = "send" if name == "trainer" else "receive"
    with waiting(f"publish of version {version}", on=f"{name}: {verb}"):
        began = time.monotonic()
        manifest = await call
    progress()
    if verb == "send":
        return manifest
    return replace(manifest, figures={**manifest.figures, "load_s": time.monotonic() - began})


def _one_line(error: BaseException | None) -> str:
    if error is None:
        return "cancelled"
    if isinstance(error, MilesError):
        return " ".join(part for part in (error.message, f"({error.found})" if error.found else "") if part)
    return f"{type(error).__name__}: {error}"
