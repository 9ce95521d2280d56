"""Two ranks of backend `megatron` on CPUs that stay, and hold one model after the other as they are told."""

from __future__ import annotations

import multiprocessing
import re
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from miles_core.capability import Capability
from miles_core.kinds.backend import Backend, BackendContext
from miles_core.registry import discover, load_target
from miles_core.testing.backend import weights
from miles_core.testing.backend_oracle import LOSS, PROBE, example_batch
from miles_core.types import Float32, TrainBatch

WORLD = 2
LIMIT_S = 240.0
Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to hold, and how."""

    load: str
    """``module:attribute`` of the table."""
    model: Path
    options: Options
    """Of the backend."""
    resume: Path | None = None
    """A checkpoint to go on from."""
    like: Path | None = None
    """The folder whose tensors are expected; None for `model`."""
    save: Path | None = None
    """Where to leave a checkpoint."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank found."""

    changed: list[str]
    """Tensors that were lost, changed, or came from nowhere."""
    logprobs: Float32
    """Of `scored_batch`."""


class Pair:
    """Ranks are forked from a process that has imported what takes them seconds, and has done nothing else.

    Example:
        with Pair(tmp_path) as pair:
            both = pair.hold([Task(load="acme.architecture:ACME", model=folder, options={"pipeline_parallel": 2})])
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started = 0
        self._ends: list[Connection] = []
        self._ranks: list[Any] = []

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def hold(self, tasks: Sequence[Task]) -> list[list[Outcome]]:
        """By rank, what it found in each task.

        Raises:
            RuntimeError: a rank failed or hangs. The next call starts other ones.
        """
        if not self._ranks:
            self._start()
        for end in self._ends:
            end.send(list(tasks))
        answers: dict[int, list[Outcome]] = {}
        deadline = time.monotonic() + LIMIT_S
        while len(answers) < WORLD:
            open_ends = [end for rank, end in enumerate(self._ends) if rank not in answers]
            ready: list[Any] = wait(open_ends, max(0.0, deadline - time.monotonic()))
            problem = None if ready else "two ranks hang"
            for end in ready:
                try:
                    answer = end.recv()
                except EOFError:
                    answer = "a rank died"
                if isinstance(answer, str):
                    problem = answer
                else:
                    answers[self._ends.index(end)] = answer
            if problem is not None:
                self._stop()
                raise RuntimeError(problem)
        return [answers[rank] for rank in range(WORLD)]

    def _start(self) -> None:
        self._started += 1
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([_backend().load.partition(":")[0], __name__])
        for rank in range(WORLD):
            ours, theirs = context.Pipe()
            meeting = f"file://{self._folder}/meeting-{self._started}"
            process = context.Process(target=_serve, args=(rank, meeting, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._ranks.append(process)

    def _stop(self) -> None:
        for end, process in zip(self._ends, self._ranks, strict=True):
            process.kill()
            process.join()
            end.close()
        self._ends, self._ranks = [], []


def _serve(rank: int, meeting: str, asked: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=WORLD)
    while True:
        try:
            tasks = asked.recv()
        except EOFError:
            return
        try:
            asked.send([_hold(rank, task) for task in tasks])
        except Exception:  # noqa: BLE001 - whatever it was, the other process reports it
            asked.send(traceback.format_exc())


def _hold(rank: int, task: Task) -> Outcome:
    backend = make_backend(task.load, task.model, rank=rank, world=WORLD, **task.options)
    if task.resume is not None:
        backend.load(task.resume)
    found = Outcome(changed(task.load, task.like or task.model, weights(backend)), backend.log_probs(scored_batch()))
    if task.save is not None:
        backend.save(task.save)
    backend.close()
    return found


def make_backend(load: str, model_path: Path, *, rank: int = 0, world: int = 1, **options: Any) -> Backend:
    """One rank of backend `megatron` that maps the checkpoint by the table, computing in float32 on the CPU."""
    capability = _backend()
    assert capability.options is not None
    settings = load_target(capability.options)(param_dtype="float32", bucket_mib=1, **options)
    context = BackendContext(
        model_path=str(model_path),
        device="cpu",
        rank=rank,
        world_size=world,
        seed=0,
        optimizer=PROBE,
        loss=LOSS,
        reference=False,
        architecture=load,
    )
    backend: Backend = load_target(capability.load)(settings, context)
    return backend


def _backend() -> Capability:
    return discover().get("backend", "megatron").capability


def changed(load: str, model_path: Path, found: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors that are not in the export as they are in the folder, and of ones that came from nowhere."""
    left_out = [re.compile(pattern) for pattern in load_target(load).left_out]
    files = [load_file(file) for file in sorted(model_path.glob("*.safetensors"))]
    wanted = {name: tensor for file in files for name, tensor in file.items()}
    wanted = {name: tensor for name, tensor in wanted.items() if not any(p.fullmatch(name) for p in left_out)}
    same = {name for name in wanted.keys() & found.keys() if torch.equal(wanted[name], found[name].cpu())}
    return sorted((wanted.keys() | found.keys()) - same)


def scored_batch() -> TrainBatch:
    return example_batch(np.random.default_rng(7), (7, 2, 19, 12))
