"""Faults planted between trainer and engine, with a real engine and a real model: each is caught within one step."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from miles_core.config.model_folder import read_model_folder
from miles_core.errors import ContractError, MilesError, TransportError
from miles_core.executors.inprocess import InProcessExecutor, InProcessTrainer
from miles_core.kinds.backend import BackendContext
from miles_core.kinds.engine import EngineContext
from miles_core.testing.executor import trainer_spec
from miles_core.testing.recording import RecordingBackend, RecordingEngine, RecordingOptions
from miles_core.testing.tiny import make_tiny_model
from miles_core.types import Float32, NamedTensor, TrainBatch, WeightBucket
from miles_core.weights.buckets import bucket_tensors
from miles_core.weights.fleet import Fleet
from miles_core.weights.lifecycle import Phase, UpdateSettings
from miles_core.weights.proof import DeliveryProof, probe_prompts
from miles_local.engine import LocalEngine
from miles_local.options import LocalOptions
from miles_transports.inprocess import InProcessSender, InProcessTransport
from miles_transports.options import InProcessOptions

SQUARE = "model.layers.0.self_attn.q_proj.weight"
"""Square in the tiny model, so that its transpose has its shape."""


class PolicyBackend(RecordingBackend):
    """A Hugging Face model that changes a little with each version, and scores tokens as transformers does."""

    def __init__(self, options: RecordingOptions, context: BackendContext) -> None:
        super().__init__(options, context)
        self.model = AutoModelForCausalLM.from_pretrained(context.model_path, dtype=torch.float32)

    def export(self, version: int) -> Iterator[WeightBucket]:
        random = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=random))
        tensors = [NamedTensor(name=n, tensor=p.detach().clone()) for n, p in self.model.named_parameters()]
        return bucket_tensors(tensors, version=version, bucket_bytes=20_000)

    def log_probs(self, batch: TrainBatch, *, model: Any = "policy") -> Float32:
        scored = []
        for start, length in zip(batch.offsets[:-1], batch.lengths, strict=True):
            ids = torch.tensor(batch.token_ids[start : start + length], dtype=torch.int64)[None]
            with torch.no_grad():
                rows = torch.log_softmax(self.model(ids).logits[0].float(), -1)
            scored.append(np.concatenate([[0.0], rows[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()]))
        return np.where(batch.loss_mask, np.concatenate(scored), 0.0).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("proof") / "model")


@asynccontextmanager
async def running(
    folder: Path, engine: type[LocalEngine], *, verify: Any = "always", probes: int = 2
) -> AsyncIterator[tuple[Fleet, InProcessTrainer, InProcessTransport]]:
    executor = InProcessExecutor()
    trainer = await executor.start_trainer(trainer_spec(load=f"{__name__}:PolicyBackend", model_path=str(folder)))
    served = engine(
        LocalOptions(), EngineContext(model_path=str(folder), context_length=None, device="cpu", seed=0, index=0)
    )
    await served.start()
    transport = InProcessTransport(InProcessOptions())
    await transport.open(trainer, [served])
    vocabulary = read_model_folder(folder).vocabulary
    assert vocabulary is not None
    proof = DeliveryProof(verify=verify, probes=probe_prompts(probes, vocabulary, 0), score=trainer.log_probs)
    try:
        yield Fleet(transport, trainer, [served], UpdateSettings(overlap=True, proof=proof)), trainer, transport
    finally:
        await transport.close()
        await served.close()
        await executor.close()


async def test_a_sound_engine_is_believed_and_the_cost_is_reported(folder: Path) -> None:
    async with running(folder, LocalEngine) as (fleet, _, _):
        for version in range(3):
            report = await fleet.publish(version)
        figures = report.figures
        assert figures["sync/verified_tensors"] == report.num_tensors
        assert figures["sync/probe_gap"] < 1e-3
        assert figures["sync/verify_s"] > 0
        assert figures["sync/probe_s"] > 0
        assert {"sync/prepare_s", "sync/digest_s", "sync/move_s", "sync/pause_s", "sync/activate_s"} <= figures.keys()


@pytest.mark.parametrize(("weight_bytes", "alarms"), [(4, True), (2, False)])
async def test_rounding_of_narrow_weights_is_no_alarm_after_a_first_publish_that_agreed_by_luck(
    weight_bytes: int, alarms: bool
) -> None:
    offset = 0.0

    async def score(batch: TrainBatch) -> Float32:
        return np.where(batch.loss_mask, np.float32(offset - 1.0), np.float32(0.0))

    engine = RecordingEngine(
        RecordingOptions(), EngineContext(model_path="", context_length=None, device="cpu", seed=0)
    )
    await engine.start()
    proof = DeliveryProof(verify="off", probes=probe_prompts(2, 90, 0), score=score, weight_bytes=weight_bytes)
    await proof.logprobs([engine], -1)
    offset = 0.02
    if alarms:
        with pytest.raises(ContractError, match="nats off"):
            await proof.logprobs([engine], -1)
    else:
        assert (await proof.logprobs([engine], -1))["sync/probe_gap"] == pytest.approx(0.02)


class SkipsATensor(LocalEngine):
    """Loads all but one: whose old value looks right, and who says that it received it."""

    async def _swap(self, model: Any, staging: Any) -> None:
        if staging.version > 0:
            staging.tensors[SQUARE] = model.views[SQUARE].clone()
        await super()._swap(model, staging)


class Transposes(LocalEngine):
    """Lays a square matrix down the wrong way round."""

    async def _swap(self, model: Any, staging: Any) -> None:
        if staging.version > 0:
            staging.tensors[SQUARE] = staging.tensors[SQUARE].T.contiguous()
        await super()._swap(model, staging)


class AppliesHalf(LocalEngine):
    """Writes the first half of its tensors and stops without a word."""

    async def _swap(self, model: Any, staging: Any) -> None:
        if staging.version > 0:
            for name in list(staging.tensors)[len(staging.tensors) // 2 :]:
                staging.tensors[name] = model.views[name].clone()
        await super()._swap(model, staging)


@pytest.mark.parametrize("engine", [SkipsATensor, Transposes, AppliesHalf])
async def test_wrong_live_weights_are_caught_by_their_digests(folder: Path, engine: type[LocalEngine]) -> None:
    async with running(folder, engine, probes=0) as (fleet, _, _):
        await fleet.publish(0)
        with pytest.raises(ContractError, match=r"engine 0: .*different: .*q_proj") as caught:
            await fleet.publish(1)
        assert fleet.phase is Phase.SPLIT
        assert "do not serve version 1" in str(caught.value)


@pytest.mark.parametrize("engine", [SkipsATensor, Transposes, AppliesHalf])
async def test_and_by_the_probes_alone(folder: Path, engine: type[LocalEngine]) -> None:
    async with running(folder, engine, verify="off") as (fleet, _, _):
        await fleet.publish(0)
        with pytest.raises(ContractError, match="nats off on average"):
            await fleet.publish(1)


class LiesAboutItsWeights(Transposes):
    """Answers with the digests of what it received instead of what it serves."""

    async def _swap(self, model: Any, staging: Any) -> None:
        from miles_local.weights import digests

        self.received = digests(staging.tensors)
        await super()._swap(model, staging)

    async def digests(self, names: Collection[str] | None = None) -> Mapping[str, str]:
        return self.received


async def test_an_engine_that_digests_its_copy_is_caught_by_the_probes(folder: Path) -> None:
    async with running(folder, LiesAboutItsWeights) as (fleet, _, _):
        await fleet.publish(0)
        with pytest.raises(ContractError, match="probe tokens"):
            await fleet.publish(1)


class KeepsItsCache(LocalEngine):
    """Swaps the weights and leaves the prefixes of the old ones to be found."""

    async def _swap(self, model: Any, staging: Any) -> None:
        async with self._between_steps:
            await self._in_thread(model.replace, staging.tensors)
            self._staging, self._version = None, staging.version


class HidesItsCache(KeepsItsCache):
    """And says that nothing was reused."""

    async def generate(self, request: Any) -> AsyncIterator[Any]:
        async for chunk in super().generate(request):
            yield replace(chunk, cached_tokens=0)


@pytest.mark.parametrize(
    ("engine", "message"), [(KeepsItsCache, "probe tokens came from a cache"), (HidesItsCache, "nats off")]
)
async def test_a_stale_prefix_cache_is_caught(folder: Path, engine: type[LocalEngine], message: str) -> None:
    async with running(folder, engine) as (fleet, _, _):
        await fleet.publish(0)
        with pytest.raises(ContractError, match=message):
            await fleet.publish(1)
        assert fleet.phase is Phase.SPLIT


class SendsTiedTwice(InProcessSender):
    """Sends the tied embedding under both its names."""

    extra = "lm_head.weight"

    def send(self, bucket: WeightBucket) -> None:
        tied = [t for t in bucket.tensors if t.name == "model.embed_tokens.weight"]
        again = tuple(NamedTensor(name=self.extra, tensor=named.tensor) for named in tied)
        super().send(replace(bucket, tensors=(*bucket.tensors, *again)))


class SendsTwice(SendsTiedTwice):
    extra = "model.embed_tokens.weight"


@pytest.mark.parametrize("sender", [SendsTiedTwice, SendsTwice])
async def test_a_tied_weight_sent_twice_is_refused_and_the_old_version_serves(
    folder: Path, sender: type[InProcessSender]
) -> None:
    async with running(folder, LocalEngine) as (fleet, trainer, transport):
        await fleet.publish(0)
        await trainer.open_sender(functools.partial(sender, transport._exchange))
        with pytest.raises(TransportError):
            await fleet.publish(1)
        assert fleet.phase is Phase.REFUSED
        assert await fleet.members[0].version() == 0


async def test_sampled_verification_has_seen_every_tensor_after_eight_updates(folder: Path) -> None:
    async with running(folder, SkipsATensor, verify="sampled", probes=0) as (fleet, _, _):
        caught: MilesError | None = None
        version = -1
        while caught is None and version < 8:
            version += 1
            try:
                await fleet.publish(version)
            except ContractError as error:
                caught = error
        assert "q_proj" in str(caught)
        assert 1 <= version <= 8
