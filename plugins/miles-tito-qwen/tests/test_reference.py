from __future__ import annotations

from pathlib import Path

from miles_core.testing.tito_reference import RecordedTemplate
from miles_tito_qwen.families import Qwen3CoderFamily, Qwen3Family, Qwen35Family

DATA = Path(__file__).parent / "data"
KEPT = "reasoning of earlier turns is kept"
OPENER = "an earlier turn keeps the opener it was sampled with"


class TestQwen3(RecordedTemplate):
    family = Qwen3Family
    recorded = DATA / "qwen3.json"
    options = {"default": {}, "off": {"thinking": False}}
    differs = {
        "reasoning before a user": KEPT,
        "off: two turns": OPENER,
        "off: three turns": OPENER,
        "off: call without reasoning": OPENER,
        "off: system in the middle": OPENER,
    }


class TestQwen35(RecordedTemplate):
    family = Qwen35Family
    recorded = DATA / "qwen35.json"
    options = {"default": {}, "off": {"thinking": False}}
    differs = {"reasoning before a user": KEPT, "two turns": OPENER, "three turns": OPENER}


class TestQwen3Coder(RecordedTemplate):
    family = Qwen3CoderFamily
    recorded = DATA / "qwen3-coder.json"
