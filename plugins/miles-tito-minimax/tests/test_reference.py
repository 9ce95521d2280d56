from __future__ import annotations

from pathlib import Path

from miles_core.testing.tito_reference import RecordedTemplate
from miles_tito_minimax.families import MiniMaxM2Family

DATA = Path(__file__).parent / "data"
KEPT = "reasoning of earlier turns is kept"
OPENER = "an earlier turn keeps the opener it was sampled with"


class TestMiniMaxM2(RecordedTemplate):
    family = MiniMaxM2Family
    recorded = DATA / "minimax-m2.json"
    differs = {
        "reasoning before a user": KEPT,
        "two turns": OPENER,
        "three turns": OPENER,
        "call without reasoning": OPENER,
        "system in the middle": "the template drops it; the family refuses it",
    }
