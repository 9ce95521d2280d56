"""Proves that an update replaces every tensor: fills the engines with noise, publishes, and compares.

A tensor that is never written stays unnoticed as long as its old value happens to be right. Noise is never right.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from miles_core.errors import ContractError
from miles_core.kinds.engine import Engine
from miles_core.watch import waiting
from miles_core.weights.digests import compare, name_some
from miles_core.weights.lifecycle import PublishReport


async def check_weight_update_equal(
    publish: Callable[[int], Awaitable[PublishReport]], engines: Sequence[Engine], version: int, *, seed: int
) -> PublishReport:
    """Scramble all engines, publish `version`, and compare every tensor they serve with the trainer's.

    Args:
        publish: `Fleet.publish`, or another function that makes `engines` serve a version.

    The engines need the tag `verifies-weights`, and nothing may be generating. Afterwards the version is published.

    Raises:
        ContractError: names, for each engine, the tensors that differ, are missing, or were exported by no trainer. It
            is also raised if the noise left a tensor as it must become, since its equality would prove nothing.
        TransportError: the publish itself failed.
    """
    with waiting("check of the weight update", on="the engines to scramble their weights"):
        await asyncio.gather(*(engine.scramble(seed + index) for index, engine in enumerate(engines)))
    noise = await _digests(engines)
    report = await publish(version)
    served = await _digests(engines)
    trained = report.manifest.digests
    problems: list[str] = []
    for index, (before, after) in enumerate(zip(noise, served, strict=True)):
        difference = compare(trained, after)
        if difference:
            problems.append(f"engine {index}: {difference}")
        unproven = sorted(name for name in trained if before.get(name) == trained[name])
        if unproven:
            problems.append(f"engine {index} did not scramble {name_some(unproven)}")
    if problems:
        raise ContractError(
            f"weights after publishing version {version} are not the trainer's",
            expected=f"{len(trained)} tensors, bit for bit, on each of {len(engines)} engines",
            found="; ".join(problems),
            do="compare the backend's exported names with the engine's; a tensor named here was never written",
        )
    return report


async def _digests(engines: Sequence[Engine]) -> list[Mapping[str, str]]:
    with waiting("check of the weight update", on="the engines' digests"):
        return list(await asyncio.gather(*(engine.digests() for engine in engines)))
