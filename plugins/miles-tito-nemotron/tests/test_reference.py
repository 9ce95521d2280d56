from __future__ import annotations

from pathlib import Path

from miles_core.testing.tito_reference import RecordedTemplate
from miles_tito_nemotron.families import Nemotron3Family

DATA = Path(__file__).parent / "data"
OPENER = "an earlier turn keeps the opener it was sampled with"


class TestNemotron3(RecordedTemplate):
    family = Nemotron3Family
    recorded = DATA / "nemotron3.json"
    options = {"default": {}, "off": {"thinking": False}, "branch": {"earlier_reasoning": "branch"}}
    differs = {
        "default: two turns": OPENER,
        "default: three turns": OPENER,
        "default: call without reasoning": OPENER,
        "default: system in the middle": OPENER,
        "branch: call without reasoning": OPENER,
    }
