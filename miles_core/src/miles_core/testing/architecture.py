"""Conformance kit for architectures: log-probs are those of transformers, and every tensor comes back bit for bit, on
one rank and in every layout of two.

class TestMine(ArchitectureConformance):
    load = "acme.architecture:ACME"
    @classmethod
    def make_model(cls, folder): AcmeForCausalLM(tiny_config).save_pretrained(folder)
"""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from miles_core.capability import Capability
from miles_core.kinds.backend import Backend, BackendContext
from miles_core.registry import discover, load_target
from miles_core.testing.backend import weights
from miles_core.testing.backend_oracle import LOSS, PROBE, example_batch, expected_update
from miles_core.types import Float32, TrainBatch

WORLD = 2
LIMIT_S = 240.0
Layouts = Mapping[str, Mapping[str, Any]]
Outcome = tuple[list[str], Float32]
"""Tensors that were lost or changed, and log-probs, under one layout."""
DENSE: Layouts = {
    "tensor": {"tensor_parallel": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_parallel": 2, "virtual_pipeline": 2},
}
SPARSE: Layouts = {
    **DENSE,
    "expert": {"expert_parallel": 2},
    "expert tensor": {"tensor_parallel": 2, "sequence_parallel": True, "expert_tensor_parallel": 2},
}


class ArchitectureConformance:
    """Subclass it, name the table in `load`, and write a model in `make_model`. Needs miles-megatron."""

    load: ClassVar[str]
    """``module:attribute`` of the table."""
    layouts: ClassVar[Layouts] = DENSE
    """Options of backend `megatron` for two ranks; `SPARSE` for a mixture of experts."""
    tolerance: ClassVar[float] = 1e-4
    """Of a log-prob, against transformers in float64."""

    @classmethod
    def make_model(cls, folder: Path) -> None:
        """Write config.json and model.safetensors of a random model in float32.

        Four layers, an even number of key-value heads, 270 tokens or more, and no weight left at 0 or 1: a tensor that
        changes places with its neighbour must show.
        """
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def model_path(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("model")
        cls.make_model(folder)
        return folder

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls, model_path: Path) -> Float32:
        """Log-probs of `_batch`, by transformers in float64."""
        return np.asarray(expected_update(model_path, _batch(), LOSS).logprobs, dtype=np.float32)

    @pytest.fixture(scope="class")
    @classmethod
    def two_ranks(cls, model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Outcome]]:
        """What each rank found, by layout."""
        folder = tmp_path_factory.mktemp("ranks")
        arguments = (str(folder), cls.load, str(model_path), dict(cls.layouts))
        # Ranks are forked from a process that has imported what takes them seconds, and has done nothing else.
        multiprocessing.set_forkserver_preload([_backend().load.partition(":")[0], __name__])
        ranks: Any = torch.multiprocessing.start_processes(  # type: ignore[attr-defined, no-untyped-call]
            _rank, args=arguments, nprocs=WORLD, join=False, start_method="forkserver"
        )
        try:
            assert ranks.join(timeout=LIMIT_S) or ranks.join(timeout=LIMIT_S), "two ranks hang"
        finally:
            for process in ranks.processes:
                process.kill()
        return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(WORLD)]

    def test_log_probs_are_those_of_transformers(self, model_path: Path, expected: Float32) -> None:
        backend = make_backend(self.load, model_path)
        found = backend.log_probs(_batch())
        backend.close()
        worst = float(np.abs(found - expected).max())
        assert worst < self.tolerance, f"log-probs differ from those of transformers by {worst:.1e}"

    def test_every_tensor_comes_back_bit_for_bit(self, model_path: Path) -> None:
        backend = make_backend(self.load, model_path)
        found = weights(backend)
        backend.close()
        assert not changed(self.load, model_path, found), "a tensor was lost or changed"

    def test_every_tensor_comes_back_from_two_ranks(self, two_ranks: list[dict[str, Outcome]]) -> None:
        for rank, outcomes in enumerate(two_ranks):
            found = {name: outcome[0] for name, outcome in outcomes.items()}
            assert found == {name: [] for name in self.layouts}, f"rank {rank}: a tensor was lost or changed: {found}"

    def test_log_probs_of_two_ranks_are_the_same(self, two_ranks: list[dict[str, Outcome]], expected: Float32) -> None:
        """Shards that come back whole may still have been the wrong ones to compute with."""
        for rank, outcomes in enumerate(two_ranks):
            worst = {name: float(np.abs(outcome[1] - expected).max()) for name, outcome in outcomes.items()}
            wrong = {name: f"{by:.1e}" for name, by in worst.items() if not by < self.tolerance}
            assert not wrong, f"rank {rank}: log-probs differ from those of transformers by {wrong}"


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


def _batch() -> TrainBatch:
    return example_batch(np.random.default_rng(7), (7, 2, 19, 12))


def _rank(rank: int, folder: str, load: str, model_path: str, layouts: Layouts) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD)
    outcomes: dict[str, Outcome] = {}
    for name, options in layouts.items():
        backend = make_backend(load, Path(model_path), rank=rank, world=WORLD, **options)
        outcomes[name] = changed(load, Path(model_path), weights(backend)), backend.log_probs(_batch())
        backend.close()
    torch.save(outcomes, Path(folder, f"rank-{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()
