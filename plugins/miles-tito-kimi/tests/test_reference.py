from __future__ import annotations

from pathlib import Path

from miles_core.testing.tito_reference import RecordedTemplate
from miles_tito_kimi.families import KimiK2Family, KimiK2ThinkingFamily

DATA = Path(__file__).parent / "data"
KEPT = "reasoning of earlier turns is kept"


class TestKimiK2(RecordedTemplate):
    family = KimiK2Family
    recorded = DATA / "kimi-k2.json"


class TestKimiK2Thinking(RecordedTemplate):
    family = KimiK2ThinkingFamily
    recorded = DATA / "kimi-k2-thinking.json"
    differs = {"reasoning before a user": KEPT}
