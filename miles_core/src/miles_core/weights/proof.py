"""Delivery proof: checks after each update that every engine serves the trainer's weights, and nothing older.

A transport can only say what was received. What an engine samples with can still differ: a load skipped a tensor, a
fused layout was filled in the wrong order, or a cache outlived its weights. Therefore two things are compared on the
live engines:

    digests     of the served tensors, in each engine, against those the trainer took while exporting   (paused)
    log-probs   of a few probe tokens, sampled by each engine and scored by the trainer                 (resumed)

Probes are the same prompts after every update, so a prefix cache that was not flushed holds exactly them. An engine
that reports reused tokens is caught by its report; one that hides them is caught by its log-probs.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from miles_core.errors import ContractError
from miles_core.kinds.engine import Engine, GenerateRequest
from miles_core.types import UNRECORDED, Float32, SamplingParams, TrainBatch, WeightManifest
from miles_core.watch import waiting
from miles_core.weights.digests import compare, name_some

Verify = Literal["always", "sampled", "off"]

SAMPLED_SHARE = 8
"""With `sampled`, each update looks at every eighth tensor, in turn: after eight updates each was seen once."""
PROBE_PROMPT_TOKENS = 48
"""Longer than the cache pages engines work with (up to 32 tokens), so that a stale page is hit."""
PROBE_OUTPUT_TOKENS = 4
GAP_FACTOR = 20.0
"""A gap this many times that of the first publish is not rounding any more. Rounding itself depends on dtype and
kernels of both sides (1e-6 nats in float32, 1e-2 in bfloat16), so it is measured, not configured."""
GAP_FLOORS = {1: 0.1, 2: 0.03, 4: 1e-3, 8: 1e-3}
"""Nats that pass in any case, by the bytes of a weight: a handful of tokens can agree by luck at the first publish, and
rounding that sends one token to another expert comes in jumps."""
GAP_CEILING = 0.5
"""Nats; above it not even the first publish is believed."""

Score = Callable[[TrainBatch], Awaitable[Float32]]
"""The trainer's log-prob of every token of a batch: `Trainer.log_probs`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """A probe, as one engine continued it."""

    token_ids: tuple[int, ...]
    """Prompt and output."""
    logprobs: tuple[float, ...]
    """Of the output."""
    cached_tokens: int
    weight_version: int
    routes: npt.NDArray[np.integer[Any]] | None = None
    """[tokens - 1, L, K] experts, where the run records them: the trainer replays them for probes as for everything."""


@dataclass(slots=True, kw_only=True)
class DeliveryProof:
    """`lifecycle.Proof` of a run."""

    verify: Verify
    probes: Sequence[tuple[int, ...]] = ()
    """Prompts; see `probe_prompts`. None means no probing."""
    score: Score | None = None
    weight_bytes: int = 4
    """Of the narrowest weights; decides how much rounding is never an alarm."""
    routes: bool = False
    """Whether the run records routes, and therefore probes do."""
    allowed_gap: float | None = field(default=None, init=False)
    """In nats; measured at the first publish."""

    async def weights(self, engines: Sequence[Engine], manifest: WeightManifest) -> Mapping[str, float]:
        """Compare live digests with the trainer's.

        Raises:
            ContractError: naming, per engine, the tensors that differ.
        """
        if self.verify == "off":
            return {}
        began = time.perf_counter()
        names = self._names(manifest)
        expected = manifest.digests if names is None else {name: manifest.digests[name] for name in names}
        with waiting(f"proof of version {manifest.version}", on="the engines' digests"):
            answers = await asyncio.gather(*(engine.digests(names) for engine in engines))
        problems = [
            f"engine {index}: {difference}"
            for index, served in enumerate(answers)
            if (difference := compare(expected, served))
        ]
        if problems:
            raise ContractError(
                f"the engines do not serve version {manifest.version} as the trainer has it",
                expected=f"{len(expected)} tensors, bit for bit, on each of {len(engines)} engines",
                found="; ".join(problems),
                do="the engines are stopped; look at how the engine loads the tensors named here",
            )
        return {
            "sync/verify_s": time.perf_counter() - began,
            "sync/verified_tensors": float(len(expected)),
        }

    def _names(self, manifest: WeightManifest) -> tuple[str, ...] | None:
        if self.verify == "always":
            return None
        ordered = sorted(manifest.digests)
        start = manifest.version % min(SAMPLED_SHARE, len(ordered))
        return tuple(ordered[start::SAMPLED_SHARE])

    async def logprobs(self, engines: Sequence[Engine], version: int) -> Mapping[str, float]:
        """Compare the engines' log-probs of the probes with the trainer's.

        Raises:
            ContractError: a probe was answered from a cache, by another version, or with other log-probs.
        """
        if not self.probes or self.score is None:
            return {}
        began = time.perf_counter()
        with waiting(f"proof of version {version}", on="the engines' answers to the probes"):
            rows = await asyncio.gather(
                *(
                    _probe(engine, prompt, f"probe-{version}-{n}", routes=self.routes)
                    for engine in engines
                    for n, prompt in enumerate(self.probes)
                )
            )
        owners = [index for index in range(len(engines)) for _ in self.probes]
        problems = [text for index, row in zip(owners, rows, strict=True) if (text := self._wrong(index, row, version))]
        if problems:
            raise self._refused(version, problems, GAP_CEILING)
        with waiting(f"proof of version {version}", on="the trainer's log-probs of the probes"):
            gaps = _gaps(rows, await self.score(probe_batch(rows)))
        allowed = min(GAP_CEILING, self.allowed_gap if self.allowed_gap is not None else GAP_CEILING)
        means = [float(np.mean(own)) for own in np.split(np.array(gaps), len(engines))]
        problems = [
            f"engine {index}: log-probs of probe tokens are {gap:.3g} nats off on average"
            for index, gap in enumerate(means)
            if gap > allowed
        ]
        if problems:
            raise self._refused(version, problems, allowed)
        if self.allowed_gap is None:
            self.allowed_gap = max(GAP_FLOORS[self.weight_bytes], GAP_FACTOR * max(means))
        return {"sync/probe_s": time.perf_counter() - began, "sync/probe_gap": max(means)}

    def _wrong(self, index: int, row: Probed, version: int) -> str | None:
        if not row.logprobs:
            return f"engine {index}: a probe got no token"
        if row.cached_tokens:
            cached = f"{row.cached_tokens} probe tokens came from a cache that the update should have flushed"
            return f"engine {index}: {cached}"
        if row.weight_version != version:
            return f"engine {index}: a probe was not sampled by version {version} alone"
        if self.routes and (row.routes is None or len(row.routes) != len(row.token_ids) - 1):
            return f"engine {index}: a probe came without its routes"
        return None

    @staticmethod
    def _refused(version: int, problems: Sequence[str], allowed: float) -> ContractError:
        return ContractError(
            f"the engines do not sample with version {version} as the trainer scores it",
            expected=f"no cached token, version {version}, log-probs within {allowed:.3g} nats on average",
            found=name_some(problems),
            do="the engines are paused; look for a cache that outlives its weights, or weights in a wrong layout",
        )


def probe_prompts(count: int, vocabulary: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """Random prompts that begin with different tokens, so that none is a prefix of another."""
    random = np.random.default_rng(seed)
    firsts = random.choice(vocabulary, size=count, replace=False)
    rest = random.integers(0, vocabulary, size=(count, PROBE_PROMPT_TOKENS - 1))
    return tuple((int(first), *map(int, row)) for first, row in zip(firsts, rest, strict=True))


async def _probe(engine: Engine, prompt: tuple[int, ...], request_id: str, *, routes: bool) -> Probed:
    request = GenerateRequest(
        request_id=request_id,
        session_id=request_id,
        token_ids=prompt,
        params=SamplingParams(temperature=0.0, max_tokens=PROBE_OUTPUT_TOKENS, seed=0),
        routes=routes,
    )
    recorded = None
    ids, cached = list(prompt), 0
    logprobs: list[float] = []
    versions: set[int] = set()
    async for chunk in engine.generate(request):
        ids.extend(chunk.token_ids)
        logprobs.extend(chunk.logprobs)
        cached = max(cached, chunk.cached_tokens)
        recorded = chunk.routes if chunk.routes is not None else recorded
        if chunk.token_ids:
            versions.add(chunk.weight_version)
    return Probed(
        token_ids=tuple(ids),
        logprobs=tuple(logprobs),
        cached_tokens=cached,
        weight_version=versions.pop() if len(versions) == 1 else -2,
        routes=recorded,
    )


def probe_batch(rows: Sequence[Probed]) -> TrainBatch:
    """A batch for the trainer to score: S = len(rows), with every output token in the mask."""
    lengths = np.array([len(row.token_ids) for row in rows], dtype=np.int64)
    total = int(lengths.sum())
    mask = np.concatenate([np.arange(len(row.token_ids)) >= len(row.token_ids) - len(row.logprobs) for row in rows])
    zeros = np.zeros(total, dtype=np.float32)
    return TrainBatch(
        lengths=lengths,
        group_ids=np.zeros(len(rows), dtype=np.int64),
        rewards=np.zeros(len(rows), dtype=np.float32),
        temperatures=np.ones(len(rows), dtype=np.float32),
        token_ids=np.concatenate([np.array(row.token_ids, dtype=np.int32) for row in rows]),
        loss_mask=mask,
        rollout_logprobs=zeros,
        versions=np.where(mask, 0, -1).astype(np.int64),
        advantages=zeros,
        token_weights=zeros,
        correction_weights=np.ones(total, dtype=np.float32),
        routes=_routes(rows),
    )


def _routes(rows: Sequence[Probed]) -> npt.NDArray[np.integer[Any]] | None:
    """[N, L, K]; a row's last position has none, since no log-prob depends on it."""
    parts = []
    for row in rows:
        if row.routes is None:
            return None
        parts += [row.routes, np.full_like(row.routes[:1], UNRECORDED)]
    return np.concatenate(parts)


def _gaps(rows: Sequence[Probed], scored_N: Float32) -> list[float]:
    """Mean |engine - trainer| log-prob of each row, in nats; infinite where one is not a number.

    The mean and not the largest: a stale cache or a wrong layout moves every token, whereas rounding sometimes moves a
    single one far.
    """
    gaps, end = [], 0
    for row in rows:
        end += len(row.token_ids)
        trained = scored_N[end - len(row.logprobs) : end]
        found = [abs(a - float(b)) for a, b in zip(row.logprobs, trained, strict=True)]
        gaps.append(math.inf if any(map(math.isnan, found)) else math.fsum(found) / max(len(found), 1))
    return gaps
