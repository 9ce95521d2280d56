"""The replay kit over the fsdp backend: packed, chunked, checkpointed."""

from __future__ import annotations

from miles_core.kinds.backend import BackendContext
from miles_core.testing.replay import ReplayConformance
from miles_fsdp.backend import FsdpBackend
from miles_fsdp.options import FsdpOptions


class TestPacked(ReplayConformance):
    def make(self, context: BackendContext, *, micro_batch_tokens: int) -> FsdpBackend:
        return FsdpBackend(FsdpOptions(param_dtype="float64", micro_batch_tokens=micro_batch_tokens), context)


class TestCheckpointed(ReplayConformance):
    def make(self, context: BackendContext, *, micro_batch_tokens: int) -> FsdpBackend:
        options = FsdpOptions(
            param_dtype="float64",
            micro_batch_tokens=micro_batch_tokens,
            logprob_chunk_tokens=5,
            gradient_checkpointing=True,
        )
        return FsdpBackend(options, context)


class TestSdpaInFloat32(ReplayConformance):
    dtype = "float32"
    rtol = 2e-5

    def make(self, context: BackendContext, *, micro_batch_tokens: int) -> FsdpBackend:
        options = FsdpOptions(param_dtype="float32", micro_batch_tokens=micro_batch_tokens, attn_implementation="eager")
        return FsdpBackend(options, context)
