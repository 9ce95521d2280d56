"""Engine `local` passes the engine kit, with and without its caches, in one slot and in few."""

from __future__ import annotations

from miles_core.kinds.engine import Engine, EngineContext
from miles_core.testing.engine import EngineConformance
from miles_local.engine import LocalEngine
from miles_local.options import LocalOptions

PROVIDES = frozenset(
    {"version-spans", "verifies-weights", "stages-aside", "streams", "pauses-in-place", "records-routes"}
)


class TestDefaults(EngineConformance):
    provides = PROVIDES

    def make(self, context: EngineContext) -> Engine:
        return LocalEngine(LocalOptions(), context)


class TestCramped(EngineConformance):
    """Fewer slots than requests, prompts in several chunks, key-value memory that makes requests wait."""

    provides = PROVIDES

    def make(self, context: EngineContext) -> Engine:
        return LocalEngine(LocalOptions(max_batch_size=3, prefill_tokens=16, kv_tokens=90), context)


class TestWithoutPrefixCache(EngineConformance):
    provides = PROVIDES

    def make(self, context: EngineContext) -> Engine:
        return LocalEngine(LocalOptions(prefix_cache=False), context)
