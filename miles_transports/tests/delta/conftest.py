"""Two trainer ranks, a driver and a host over one store, without transport or engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import safetensors.torch
import torch

from miles_core.types import NamedTensor
from miles_core.weights.buckets import bucket_tensors
from miles_transports.delta.checkout import Checkout
from miles_transports.delta.codec import Encoding
from miles_transports.delta.files import Files
from miles_transports.delta.index import BASE, Key
from miles_transports.delta.publication import Publication
from miles_transports.delta.source import DeltaSource
from miles_transports.delta.store import FolderStore, Store

Weights = dict[str, torch.Tensor]
LINEAGE = "run"


def weights(version: int) -> Weights:
    """Version -1 is the checkpoint; each later one changes some tensors here and there."""
    random = torch.Generator().manual_seed(0)
    made: Weights = {
        "embed.weight": torch.randn(40, 8, generator=random).to(torch.bfloat16),
        "layers.0.q_proj.weight": torch.randn(8, 8, generator=random).to(torch.bfloat16),
        "layers.0.k_proj.weight": torch.randn(8, 8, generator=random).to(torch.bfloat16),
        "layers.1.norm.weight": torch.ones(8),
        "layers.1.bias": torch.zeros(3, dtype=torch.float64),
        "frozen.weight": torch.full((4,), 2.0),
    }
    for step in range(version + 1):
        for number, name in enumerate(sorted(made)):
            if name != "frozen.weight" and (number + step) % 2:
                made[name].view(-1)[step % made[name].numel()] += 1
    return made


def large(version: int) -> Weights:
    """Tensors of several pieces each, in which every version changes some elements."""
    made: Weights = {}
    for number in range(4):
        elements = torch.arange(150_000 + number, dtype=torch.int16) * (2 * number + 1)
        elements[number::97] += 3 * (version + 1)
        made[f"layers.{number}.weight"] = elements
    return made


@dataclass
class World:
    """Two ranks, a driver and a host, over one store."""

    base: Path
    local: Path
    store: Store
    encoding: Encoding = "xor"
    snapshot_every: int = 0
    keep: int = 2
    visible_s: float = 60.0
    weights: Callable[[int], Weights] = weights
    sources: list[DeltaSource] = field(default_factory=list)
    publication: Publication | None = None

    def start(self, store: Store | None = None) -> None:
        """The trainer's processes and the driver, anew: they remember nothing."""
        store = store or self.store
        self.connect(store)
        self.publication = Publication(
            store,
            LINEAGE,
            names=self.weights(BASE),
            encoding=self.encoding,
            kind="xxh3-128",
            snapshot_every=self.snapshot_every,
            keep=self.keep,
            visible_s=self.visible_s,
        )

    def connect(self, store: Store | None = None) -> None:
        """The trainer's ends alone, anew: the driver knows what is published."""
        store = store or self.store
        self.close()
        self.sources = [self.source(rank, 2, store) for rank in range(2)]

    def source(self, rank: int, world_size: int, store: Store | None = None) -> DeltaSource:
        return DeltaSource(
            self.base,
            store or self.store,
            LINEAGE,
            rank=rank,
            world_size=world_size,
            encoding=self.encoding,
            kind="xxh3-128",
            visible_s=self.visible_s,
        )

    def publish(self, version: int, tensors: Weights | None = None) -> Key:
        assert self.publication is not None
        base, full = self.publication.begin(version)
        tensors = self.weights(version) if tensors is None else tensors
        named = [NamedTensor(name=name, tensor=tensor) for name, tensor in tensors.items()]
        for source in self.sources:
            source.begin(version, base)
            for bucket in bucket_tensors(named, version=version, bucket_bytes=200):
                source.add(bucket)
        for source in self.sources:
            source.finish(full=full)
        key = self.publication.seal(version, tensors)
        self.publication.collect()
        return key

    def checkout(self, files: Files | None = None, local: Path | None = None, timeout_s: float = 60.0) -> Checkout:
        return Checkout(self.base, local or self.local, self.store, LINEAGE, timeout_s=timeout_s, files=files)

    def close(self) -> None:
        for source in self.sources:
            source.close()
        self.sources = []


@pytest.fixture
def make(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., World]:
    def made(weights: Callable[[int], Weights] = weights, **kwargs: object) -> World:
        number = len(list(tmp_path.iterdir()))
        base = tmp_path / f"base-{number}"
        base.mkdir()
        tensors = weights(BASE)
        names = sorted(tensors)
        half = len(names) // 2
        safetensors.torch.save_file({n: tensors[n] for n in names[:half]}, base / "model-00001-of-00002.safetensors")
        safetensors.torch.save_file({n: tensors[n] for n in names[half:]}, base / "model-00002-of-00002.safetensors")
        (base / "config.json").write_text("{}")
        store = kwargs.pop("store", None) or FolderStore(tmp_path / f"published-{number}")
        world = World(base, tmp_path / f"local-{number}", store, weights=weights, **kwargs)  # type: ignore[arg-type]
        request.addfinalizer(world.close)
        world.start()
        return world

    return made


def holds(folder: Path, version: int, weights: Callable[[int], Weights] = weights) -> bool:
    found = {name: t for file in folder.glob("*.safetensors") for name, t in safetensors.torch.load_file(file).items()}
    expected = weights(version)
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
