"""Test doubles for both ends of a weight update: a backend that exports known tensors, an engine that records them.

Both implement their whole protocol over a dictionary of small tensors, so that transports and executors can be tested
without a model. Both can be told to fail at a certain point.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from miles_core.errors import EngineError, EngineLost
from miles_core.kinds.backend import BackendContext, RouteCounts, StepMetrics
from miles_core.kinds.engine import Chunk, EngineContext, GenerateRequest, PauseMode
from miles_core.kinds.transport import Receiver
from miles_core.types import FinishReason, Float32, NamedTensor, TrainBatch, WeightBucket, WeightManifest
from miles_core.weights.digests import digest_tensor

Weights = dict[str, torch.Tensor]


def example_weights(version: int) -> Weights:
    """Small tensors of every awkward sort; equal for equal versions and different in every tensor otherwise.

    Two names share one storage (tied), one tensor is not contiguous, one has no dimension.
    """
    random = torch.Generator().manual_seed(version + 1000)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    embedding = draw(7, 4)
    return {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": embedding,
        "model.layers.0.mlp.up_proj.weight": draw(6, 4).to(torch.bfloat16),
        "model.layers.0.mlp.down_proj.weight": draw(6, 5).T,
        "model.layers.0.mlp.gate.e_score_correction_bias": draw(3).to(torch.float64),
        "model.layers.0.mlp.experts.weight": draw(2, 3, 4).to(torch.float8_e4m3fn),
        "model.layers.0.steps": torch.tensor(version, dtype=torch.int64),
        "model.layers.0.active": (draw(65) > 0),
        "model.norm.weight": draw(4).to(torch.float16),
    }


def write_example_checkpoint(folder: Path, version: int = -1) -> Path:
    """A checkpoint with the names, dtypes and shapes of `example_weights`, in two files."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.clone().contiguous() for name, tensor in example_weights(version).items()}
    names = list(tensors)
    for number, part in enumerate((names[:4], names[4:]), start=1):
        save_file({name: tensors[name] for name in part}, folder / f"model-{number:05d}-of-00002.safetensors")
    return folder


def buckets_of(weights: Mapping[str, torch.Tensor], version: int, tensors_per_bucket: int) -> Iterator[WeightBucket]:
    """The weights as a backend exports them, in the mapping's order."""
    named = [NamedTensor(name=name, tensor=tensor) for name, tensor in weights.items()]
    starts = range(0, len(named), tensors_per_bucket)
    for index, start in enumerate(starts):
        tensors = tuple(named[start : start + tensors_per_bucket])
        last = index == len(starts) - 1
        yield WeightBucket(version=version, index=index, last=last, tensors=tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingOptions:
    """What the doubles do wrong, and when."""

    tensors_per_bucket: int = 2
    fail_export_at: int | None = None
    """Bucket index before which the backend's export raises."""
    fail_version: int | None = None
    """Only this version's export or receive fails; None is every one."""
    fail_times: int | None = None
    """How often a receive fails before it succeeds; None is always."""
    export_delay_s: float = 0.0
    """Seconds before each exported bucket."""
    live: bool = False
    """A train step zeroes the tensors last exported, in place, as an optimizer changes live parameters."""
    fail_step: str | None = None
    """Message of the error every train step raises on the highest rank."""
    fail_receive: tuple[int, int] | None = None
    """(engine, bucket): that engine raises while it loads that bucket."""
    fail_activate: tuple[int, ...] = ()
    """Engines whose activation raises."""
    fail_start: tuple[int, ...] = ()
    """Engines that do not start."""


class RecordingBackend:
    """Exports `example_weights` of the version asked for; a train step sums the batch over all ranks."""

    def __init__(self, options: RecordingOptions, context: BackendContext) -> None:
        self._options = options
        self._context = context
        self.calls: list[str] = []
        self.exported: Weights = {}

    def log_probs(self, batch: TrainBatch, *, model: Literal["policy", "reference"] = "policy") -> Float32:
        self.calls.append(f"log_probs {model}")
        return np.full(batch.num_tokens, -float(self._context.rank + 1), dtype=np.float32)

    def route_counts(self) -> RouteCounts | None:
        if self._context.routes == "off":
            return None
        return RouteCounts(recorded=self._context.rank + 1, unrecorded=0, own_differs=0, used_differs=0)

    def train_step(self, batch: TrainBatch) -> StepMetrics:
        rank, world_size = self._context.rank, self._context.world_size
        if self._options.fail_step is not None and rank == world_size - 1:
            raise ValueError(self._options.fail_step)
        if self._options.live:
            for tensor in self.exported.values():
                tensor.zero_()
        total = torch.tensor([float(batch.num_tokens), float(rank + 1)], dtype=torch.float64)
        if world_size > 1:
            dist.all_reduce(total)
        return StepMetrics(values={"tokens": float(total[0]), "ranks": float(total[1])})

    def export(self, version: int) -> Iterator[WeightBucket]:
        options = self._options
        self.exported = example_weights(version)
        for bucket in buckets_of(self.exported, version, options.tensors_per_bucket):
            time.sleep(options.export_delay_s)
            if bucket.index == options.fail_export_at and options.fail_version in (None, version):
                raise ValueError(f"planned failure before bucket {bucket.index}")
            yield bucket

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"rank-{self._context.rank}.txt").write_text("saved")

    def load(self, directory: Path) -> None:
        (directory / f"rank-{self._context.rank}.txt").read_text()

    def save_hf(self, directory: Path) -> None:
        self.save(directory)

    def offload(self) -> None:
        self.calls.append("offload")

    def onload(self) -> None:
        self.calls.append("onload")

    def close(self) -> None:
        self.calls.append("close")


@dataclass(slots=True)
class _Staged:
    version: int
    tensors: Weights = field(default_factory=dict)


class RecordingEngine:
    """Serves `example_weights`; `events` tells in which order it was asked for what.

    `generate` echoes the prompt, one token a chunk, and waits between tokens while paused.
    """

    def __init__(self, options: RecordingOptions, context: EngineContext) -> None:
        self._options = options
        self.index = context.index
        self.events: list[str] = []
        self.weights: Weights = {name: torch.zeros_like(tensor) for name, tensor in example_weights(0).items()}
        self._version = -1
        self._running = asyncio.Event()
        self._receiver: Receiver | None = None
        self._staged: _Staged | None = None
        self._closed = False
        self._failures = 0
        self._requests = 0

    async def start(self) -> None:
        if self.index in self._options.fail_start:
            raise EngineError("planned failure to start")
        self._running.set()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        output = request.token_ids[: request.params.max_tokens]
        self._requests += 1
        try:
            for position, token in enumerate(output):
                await self._running.wait()
                await asyncio.sleep(0.001)
                if self._closed:
                    raise EngineLost("the engine is closed", where=f"engine {self.index}")
                finish = FinishReason.LENGTH if position == len(output) - 1 else None
                yield Chunk(token_ids=(token,), logprobs=(-1.0,), weight_version=self._version, finish_reason=finish)
        finally:
            self._requests -= 1

    async def pause(self, mode: PauseMode = "retract") -> None:
        self.events.append("pause" if mode == "retract" else f"pause {mode}")
        self._running.clear()

    async def resume(self) -> None:
        self.events.append("resume")
        self._running.set()

    async def open_receiver(self, make: Callable[[], Receiver]) -> None:
        before, self._receiver = self._receiver, None
        if before is not None:
            before.close()
        self._receiver = await asyncio.to_thread(make)

    async def receive(self, version: int) -> WeightManifest:
        self.events.append(f"receive {version}")
        self._staged = None
        return await asyncio.to_thread(self._receive, version)

    def _receive(self, version: int) -> WeightManifest:
        if self._receiver is None:
            raise EngineError("no receiver", where=f"engine {self.index}")
        staged: Weights = {}
        for bucket in self._receiver.receive(version):
            self.taken(bucket)
            if self._fails(version, bucket.index):
                raise EngineError(f"planned failure at bucket {bucket.index}", where=f"engine {self.index}")
            for named in bucket.tensors:
                self._check(named, staged)
                staged[named.name] = named.tensor
        missing = sorted(self.weights.keys() - staged.keys())
        if missing:
            raise EngineError(f"missing tensors: {', '.join(missing)}", where=f"engine {self.index}")
        self._staged = _Staged(version, staged)
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in staged.values())
        return WeightManifest(version=version, digests=_digests(staged), num_bytes=num_bytes)

    def taken(self, bucket: WeightBucket) -> None:
        """Called for every bucket that arrives, in order."""

    def _fails(self, version: int, bucket: int) -> bool:
        options = self._options
        planned = options.fail_receive == (self.index, bucket) and options.fail_version in (None, version)
        if not planned or self._failures == options.fail_times:
            return False
        self._failures += 1
        return True

    def _check(self, named: NamedTensor, staged: Weights) -> None:
        problem = None
        if named.name not in self.weights:
            problem = "is unknown"
        elif named.name in staged:
            problem = "came twice"
        else:
            found, expected = (f"{tuple(t.shape)} {t.dtype}" for t in (named.tensor, self.weights[named.name]))
            if found != expected:
                problem = f"is {found}, expected {expected}"
        if problem:
            raise EngineError(f"tensor {named.name!r} {problem}", where=f"engine {self.index}")

    def stage_directly(self, version: int, weights: Weights) -> None:
        """Stage without a transport."""
        self._staged = _Staged(version, weights)

    def adopt_staged(self) -> None:
        """Serve what is staged, without checks."""
        if self._staged is not None:
            self.weights, self._version, self._staged = self._staged.tensors, self._staged.version, None

    async def activate(self, version: int) -> None:
        self.events.append(f"activate {version}")
        if self.index in self._options.fail_activate:
            raise EngineError("planned failure to activate", where=f"engine {self.index}")
        if self._staged is None or self._staged.version != version:
            raise EngineError(f"version {version} is not staged completely", where=f"engine {self.index}")
        self.adopt_staged()

    async def version(self) -> int:
        return self._version

    async def scramble(self, seed: int) -> None:
        self.events.append("scramble")
        self.weights = {name: tensor.clone() for name, tensor in example_weights(-seed - 2).items()}

    async def digests(self, names: Collection[str] | None = None) -> Mapping[str, str]:
        return _digests({name: tensor for name, tensor in self.weights.items() if names is None or name in names})

    async def stats(self) -> Mapping[str, float]:
        return {"running": float(self._running.is_set()), "requests": float(self._requests)}

    async def close(self) -> None:
        self.events.append("close")
        self._closed = True
        if self._receiver is not None:
            self._receiver.close()


def _digests(weights: Weights) -> dict[str, str]:
    return {name: digest_tensor(tensor) for name, tensor in weights.items()}
