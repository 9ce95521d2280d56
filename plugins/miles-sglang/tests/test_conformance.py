"""Engine `sglang` passes the engine kit against a real server that it is attached to."""

from __future__ import annotations

from typing import Any

import pytest

from miles_core.kinds.engine import Engine, EngineContext
from miles_core.testing.engine import EngineConformance
from miles_sglang.engine import SglangEngine
from miles_sglang.options import SglangOptions

pytestmark = pytest.mark.sglang


class TestAttached(EngineConformance):
    provides = frozenset({"version-spans", "verifies-weights", "streams", "pauses-in-place"})
    tolerance = 1e-5
    deadline_s = 180.0
    flight_tokens = 60
    refused_filters = frozenset({"min_p"})

    @pytest.fixture(autouse=True)
    def _server(self, seeded: Any) -> None:
        self.options: dict[str, Any] = {
            "urls": (seeded.url,) * 4, "dtype": "float32", "deterministic": True, "stream_interval": 1,
        }  # fmt: skip

    def make(self, context: EngineContext) -> Engine:
        return SglangEngine(SglangOptions(**self.options), context)
