"""Engines that are wrong in one plausible way each; all but the fault is engine `local`."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import AsyncIterator, Collection, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch

from miles_core.kinds.engine import Chunk, Engine, EngineContext, GenerateRequest, PauseMode
from miles_core.testing.engine import EngineConformance
from miles_core.testing.engine_oracle import Feed
from miles_core.types import FinishReason, NamedTensor, WeightBucket, WeightManifest
from miles_local.attention import NAME
from miles_local.engine import LocalEngine
from miles_local.model import LocalModel
from miles_local.options import LocalOptions
from miles_local.scheduler import Plan, Row

LOGPROBS = "test_logprobs_are_those_of_a_full_forward"
FILTERS = "test_filters_restrict_what_is_sampled_and_never_renormalise"
STAGED = "test_staged_weights_are_invisible_until_activated"
ASIDE = "test_it_generates_with_the_old_weights_while_it_stages_the_new_ones"
EXACT = "test_a_version_that_is_not_exactly_the_weights_is_refused"
IN_FLIGHT = "test_requests_in_flight_go_on_under_the_new_weights"
PREFIX = "test_no_prefix_outlives_its_weights"
IN_PLACE = "test_frozen_requests_go_on_over_their_old_kv_and_nobody_else_does"
PAUSE = "test_a_pause_holds_requests_and_loses_none"


@functools.cache
def _checkpoint(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    LocalModel.load(folder, device="cpu", dtype="checkpoint")  # registers the attention function
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=NAME).eval()


class Quick(LocalEngine):
    """Engine `local` that copies a model loaded once: many faults times many tests would load it hundreds of times."""

    model: ClassVar[type[LocalModel]] = LocalModel

    def _load(self) -> LocalModel:
        return self.model(copy.deepcopy(_checkpoint(self._context.model_path)), torch.device("cpu"))


class Kit(EngineConformance):
    __test__ = False
    engine: ClassVar[type[LocalEngine]]
    provides = frozenset({"version-spans", "verifies-weights", "streams", "pauses-in-place"})

    def make(self, context: EngineContext) -> Engine:
        return self.engine(LocalOptions(), context)


# --- log-probs ------------------------------------------------------------------------------------------------------


class ShiftedLogprobs(Quick):
    """Reports with each token the log-prob of the one before it."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        last = -1.0
        async for chunk in super().generate(request):
            shifted = (last, *chunk.logprobs)[: len(chunk.logprobs)]
            last = chunk.logprobs[-1] if chunk.logprobs else last
            yield replace(chunk, logprobs=shifted)


class TestShiftsLogprobsByOne(Kit):
    __test__ = True
    engine = ShiftedLogprobs
    caught_by: ClassVar[dict[str, str]] = {LOGPROBS: "log-probs are off by", FILTERS: "is not the full vocabulary's"}


class RenormalisingModel(LocalModel):
    """Removes what top-k, top-p and min-p exclude before it takes the softmax."""

    def _forward(self, plan: Plan) -> torch.Tensor:
        logits = super()._forward(plan).clone()
        for row, draw in zip(logits, plan.draws, strict=False):
            values, ids = row.sort(descending=True)
            probs = values.softmax(-1)
            kept = (probs.cumsum(0) - probs < draw.top_p) & (probs >= draw.min_p * probs[0])
            kept &= torch.arange(len(ids)) < (draw.top_k or len(ids))
            row[ids[~kept]] = -math.inf
        return logits


class Renormalising(Quick):
    model = RenormalisingModel


class TestRenormalisesLogprobsAfterTopP(Kit):
    __test__ = True
    engine = Renormalising
    caught_by: ClassVar[dict[str, str]] = {FILTERS: "is not the full vocabulary's"}


# --- weights --------------------------------------------------------------------------------------------------------


class Eager(Quick):
    """Writes each bucket into the serving weights as it arrives."""

    async def receive(self, version: int) -> WeightManifest:
        feed, model = self._receiver, self._served()

        class Written(Feed):
            def receive(self, version: int) -> Iterator[WeightBucket]:
                assert feed is not None
                for bucket in feed.receive(version):
                    for named in bucket.tensors:
                        if named.name in model.views and model.views[named.name].shape == named.tensor.shape:
                            model.views[named.name].copy_(named.tensor)
                    yield bucket

        self._receiver = Written()
        try:
            return await super().receive(version)
        finally:
            self._receiver = feed
            self._forget()


class TestServesBucketsBeforeTheLastOne(Kit):
    __test__ = True
    engine = Eager
    provides = Kit.provides | {"stages-aside"}
    caught_by: ClassVar[dict[str, str]] = {
        ASIDE: "staging changed the served weights",
        STAGED: "staged weights were served before activate",
        EXACT: "with fault 'missing' is served",
        IN_PLACE: "the KV of a frozen request was recomputed",
    }


class Forgiving(Quick):
    """Fills in from the old weights whatever the trainer did not send."""

    async def receive(self, version: int) -> WeightManifest:
        feed, model = self._receiver, self._served()

        class Completed(Feed):
            def receive(self, version: int) -> Iterator[WeightBucket]:
                assert feed is not None
                sent: set[str] = set()
                for bucket in feed.receive(version):
                    sent |= {named.name for named in bucket.tensors}
                    absent = [name for name in model.views if name not in sent] if bucket.last else []
                    filled = tuple(NamedTensor(name=name, tensor=model.views[name].clone()) for name in absent)
                    yield replace(bucket, tensors=bucket.tensors + filled)

        self._receiver = Completed()
        try:
            return await super().receive(version)
        finally:
            self._receiver = feed


class TestAcceptsAMissingTensor(Kit):
    __test__ = True
    engine = Forgiving
    caught_by: ClassVar[dict[str, str]] = {EXACT: "with fault 'missing' was staged"}


class Hoarding(Quick):
    """Keeps key-values and prefixes when the weights change."""

    async def pause(self, mode: PauseMode = "retract") -> None:
        await super().pause("abort" if mode == "abort" else "in-place")
        self._keep_kv = False

    async def activate(self, version: int) -> None:
        model: Any = self._served()
        model.forget = lambda: None
        scheduler: Any = self._scheduler
        self._scheduler = _Unflushed(scheduler)  # type: ignore[assignment]
        try:
            await super().activate(version)
        finally:
            self._scheduler = scheduler


class _Unflushed:
    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def flush(self) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


class TestKeepsKeyValuesAcrossVersions(Kit):
    __test__ = True
    engine = Hoarding
    caught_by: ClassVar[dict[str, str]] = {
        PREFIX: "a prefix of the old weights was reused",
        IN_FLIGHT: "not those of the new weights",
        STAGED: "the old weights are still served",
        IN_PLACE: "a request reused KV of the old weights",
    }


class TiedTwice(Quick):
    """Digests a tied tensor under both its names."""

    async def digests(self, names: Collection[str] | None = None) -> dict[str, str]:
        found = dict(await super().digests(names))
        return {**found, "lm_head.weight": found["model.embed_tokens.weight"]}


class TestCountsATiedTensorTwice(Kit):
    __test__ = True
    engine = TiedTwice
    caught_by: ClassVar[dict[str, str]] = {
        "test_noise_reaches_every_tensor_and_a_publish_replaces_all_of_it": "digests are not those of the loaded"
    }


# --- requests -------------------------------------------------------------------------------------------------------


class Dropping(Quick):
    """Ends the requests in flight when it pauses."""

    async def pause(self, mode: PauseMode = "retract") -> None:
        await super().pause(mode)
        for row in list(self._scheduler.rows()):
            self._scheduler.close(row, keep_prefix=False)
            self._streams.pop(row).finish(FinishReason.ABORT, 0)


class TestDropsRequestsOnPause(Kit):
    __test__ = True
    engine = Dropping
    caught_by: ClassVar[dict[str, str]] = {
        PAUSE: "a request was lost in the pause",
        IN_FLIGHT: "versions",
        IN_PLACE: "versions",
    }


class Unfrozen(Quick):
    """Recomputes everything after an update, whatever the pause asked for."""

    async def pause(self, mode: PauseMode = "retract") -> None:
        await super().pause("retract" if mode == "in-place" else mode)


class TestRecomputesFrozenRequests(Kit):
    __test__ = True
    engine = Unfrozen
    caught_by: ClassVar[dict[str, str]] = {IN_PLACE: "the KV of a frozen request was recomputed"}


class Shared(Quick):
    """Lets new requests start from the KV of frozen ones."""

    async def resume(self) -> None:
        await super().resume()
        for row in self._scheduler.rows():
            row.mixed = False


class TestSharesTheKvOfFrozenRequests(Kit):
    __test__ = True
    engine = Shared
    caught_by: ClassVar[dict[str, str]] = {IN_PLACE: "a request reused KV of the old weights"}


class Deaf(Quick):
    """Takes an abort for an ordinary pause."""

    async def pause(self, mode: PauseMode = "retract") -> None:
        await super().pause("retract" if mode == "abort" else mode)


class TestHoldsWhatItShouldAbort(Kit):
    __test__ = True
    engine = Deaf
    deadline_s = 8.0
    caught_by: ClassVar[dict[str, str]] = {
        "test_an_abort_ends_requests_in_flight_and_keeps_their_tokens": "TimeoutError"
    }


class BatchSeeded(Quick):
    """Draws from one stream of random numbers for the whole batch, seeded by whoever came first."""

    def _make_row(self, request: GenerateRequest) -> Row:
        row = super()._make_row(request)
        row.seed = f"{row.seed}|{len(self._streams)}"
        return row


class TestSeedsTheBatchNotTheRequest(Kit):
    __test__ = True
    engine = BatchSeeded
    caught_by: ClassVar[dict[str, str]] = {
        "test_a_seed_decides_the_tokens_whatever_else_runs": "the rest of the batch changed what a seed samples"
    }


class Truncating(Quick):
    """Cuts a prompt that does not fit from the left and says nothing."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        room = (self._context.context_length or 96) - 1
        async for chunk in super().generate(replace(request, token_ids=request.token_ids[-room:])):
            yield chunk


class TestTruncatesLongPrompts(Kit):
    __test__ = True
    engine = Truncating
    caught_by: ClassVar[dict[str, str]] = {
        "test_what_does_not_fit_is_refused_with_numbers": "a prompt that cannot be served was answered"
    }


class CutsStopTokens(Quick):
    """Takes the stop token out of what it sampled."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        async for chunk in super().generate(request):
            kept = [i for i, token in enumerate(chunk.token_ids) if token not in request.params.stop_token_ids]
            yield replace(
                chunk,
                token_ids=tuple(chunk.token_ids[i] for i in kept),
                logprobs=tuple(chunk.logprobs[i] for i in kept),
            )


class TestCutsStopTokensFromTheRow(Kit):
    __test__ = True
    engine = CutsStopTokens
    caught_by: ClassVar[dict[str, str]] = {
        "test_stop_tokens_and_stop_strings_end_a_row_and_stay_in_it": "must end the row and stay in it"
    }
