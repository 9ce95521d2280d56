"""The backend kit over the megatron backend, on one rank."""

from __future__ import annotations

from typing import ClassVar

import miles_megatron.start  # noqa: F401
from miles_core.kinds.backend import BackendContext
from miles_core.testing.backend import BackendConformance
from miles_core.testing.replay import ReplayConformance
from miles_megatron.backend import MegatronBackend
from miles_megatron.options import MegatronOptions

TAGS = frozenset({"multi-rank", "reference-model", "replays-routes"})


class TestFloat32(BackendConformance):
    dtype = "float32"
    tags: ClassVar[frozenset[str]] = TAGS

    def make(self, context: BackendContext, *, micro_batch_tokens: int) -> MegatronBackend:
        options = MegatronOptions(param_dtype="float32", micro_batch_tokens=micro_batch_tokens, bucket_mib=1)
        return MegatronBackend(options, context)


class TestDistributedAndRecomputed(BackendConformance):
    dtype = "float32"
    tags: ClassVar[frozenset[str]] = TAGS

    def make(self, context: BackendContext, *, micro_batch_tokens: int) -> MegatronBackend:
        options = MegatronOptions(
            micro_batch_tokens=micro_batch_tokens,
            logprob_chunk_tokens=5,
            distributed_optimizer=True,
            recompute="full",
        )
        return MegatronBackend(options, context)


class TestReplay(ReplayConformance):
    dtype = "float32"
    rtol = 1e-4

    def make(self, context: BackendContext, *, micro_batch_tokens: int) -> MegatronBackend:
        return MegatronBackend(MegatronOptions(micro_batch_tokens=micro_batch_tokens, recompute="full"), context)
