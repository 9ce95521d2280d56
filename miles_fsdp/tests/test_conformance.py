"""The backend kit over the fsdp backend, in the dtypes whose gradients can be compared with float64."""

from __future__ import annotations

from miles_core.kinds.backend import BackendContext
from miles_core.testing.backend import BackendConformance
from miles_fsdp.backend import FsdpBackend
from miles_fsdp.options import FsdpOptions


class TestFloat32(BackendConformance):
    dtype = "float32"
    tags = frozenset({"multi-rank", "reference-model", "replays-routes"})

    def make(self, context: BackendContext, *, micro_batch_tokens: int) -> FsdpBackend:
        options = FsdpOptions(param_dtype="float32", micro_batch_tokens=micro_batch_tokens, bucket_mib=1)
        return FsdpBackend(options, context)


class TestFloat64ChunkedAndCheckpointed(BackendConformance):
    dtype = "float64"
    tags = frozenset({"multi-rank", "reference-model", "replays-routes"})

    def make(self, context: BackendContext, *, micro_batch_tokens: int) -> FsdpBackend:
        options = FsdpOptions(
            param_dtype="float64",
            micro_batch_tokens=micro_batch_tokens,
            logprob_chunk_tokens=5,
            gradient_checkpointing=True,
        )
        return FsdpBackend(options, context)
