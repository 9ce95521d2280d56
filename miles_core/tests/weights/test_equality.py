"""check_weight_update_equal finds the tensor that nobody writes."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Collection, Mapping

import pytest

from miles_core.errors import ContractError
from miles_core.kinds.engine import EngineContext
from miles_core.kinds.transport import Staged
from miles_core.testing.recording import RecordingEngine, RecordingOptions, example_weights
from miles_core.types import WeightManifest
from miles_core.weights.digests import digest_tensor
from miles_core.weights.equality import check_weight_update_equal
from miles_core.weights.lifecycle import PublishReport, publish

SKIPPED = "model.norm.weight"


class Forgetful(RecordingEngine):
    """Accounts for the whole version but keeps its old value of one tensor."""

    async def activate(self, version: int) -> None:
        old = self.weights[SKIPPED]
        await super().activate(version)
        self.weights[SKIPPED] = old


class Unscrambled(RecordingEngine):
    """Its noise leaves one tensor as the trainer has it."""

    async def scramble(self, seed: int) -> None:
        await super().scramble(seed)
        self.weights[SKIPPED] = example_weights(0)[SKIPPED]


class Poorer(RecordingEngine):
    """Serves with one tensor fewer than the trainer exports and one that it does not."""

    async def digests(self, names: Collection[str] | None = None) -> Mapping[str, str]:
        digests = dict(await super().digests())
        digests["rotary.inv_freq"] = digests.pop(SKIPPED)
        return digests


def publisher(engines: list[RecordingEngine]) -> Callable[[int], Awaitable[PublishReport]]:
    return functools.partial(publish, MemoryTransport(*engines), engines)


class MemoryTransport:
    def __init__(self, *engines: RecordingEngine) -> None:
        self.engines = engines

    async def open(self, source: object, engines: object) -> None: ...

    async def publish(self, version: int) -> Staged:
        weights = example_weights(version)
        for engine in self.engines:
            engine.stage_directly(version, dict(weights))
        digests = {name: digest_tensor(tensor) for name, tensor in weights.items()}
        manifest = WeightManifest(version=version, digests=digests, num_bytes=1)
        return Staged(sent=manifest, received=(manifest,) * len(self.engines))

    async def close(self) -> None: ...


async def make(kind: type[RecordingEngine], index: int = 0) -> RecordingEngine:
    engine = kind(
        RecordingOptions(), EngineContext(model_path="", context_length=None, device="cpu", seed=0, index=index)
    )
    await engine.start()
    return engine


async def test_equal_weights_pass_and_are_published() -> None:
    engines = [await make(RecordingEngine), await make(RecordingEngine, 1)]
    report = await check_weight_update_equal(publisher(engines), engines, 0, seed=7)
    assert report.version == 0
    assert [await engine.version() for engine in engines] == [0, 0]


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (Forgetful, ["engine 1", "different", SKIPPED]),
        (Unscrambled, ["engine 1", "did not scramble", SKIPPED]),
        (Poorer, ["engine 1", "missing", SKIPPED, "unexpected", "rotary.inv_freq"]),
    ],
)
async def test_a_tensor_that_is_not_replaced_is_named_with_its_engine(
    kind: type[RecordingEngine], named: list[str]
) -> None:
    engines = [await make(RecordingEngine), await make(kind, 1)]
    with pytest.raises(ContractError) as caught:
        await check_weight_update_equal(publisher(engines), engines, 0, seed=7)
    for text in named:
        assert text in str(caught.value)
    assert "engine 0" not in str(caught.value)
