from __future__ import annotations

from pathlib import Path

from miles_core.testing.tito_reference import RecordedTemplate
from miles_tito_glm.families import Glm46Family, Glm47Family

DATA = Path(__file__).parent / "data"
KEPT = "reasoning of earlier turns is kept"
OPENER = "an earlier turn keeps the opener it was sampled with"


class TestGlm46(RecordedTemplate):
    family = Glm46Family
    recorded = DATA / "glm46.json"
    options = {"default": {}, "off": {"thinking": False}}
    differs = {"reasoning before a user": KEPT}


class TestGlm47(RecordedTemplate):
    family = Glm47Family
    recorded = DATA / "glm47.json"
    options = {"default": {}, "off": {"thinking": False}, "branch": {"earlier_reasoning": "branch"}}
    differs = {
        "default: two turns": OPENER,
        "default: three turns": OPENER,
        "default: call without reasoning": OPENER,
        "default: system in the middle": OPENER,
        "branch: call without reasoning": OPENER,
    }
