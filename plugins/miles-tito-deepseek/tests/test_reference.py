from __future__ import annotations

from pathlib import Path

from miles_core.testing.tito_reference import CONVERSATIONS, RecordedTemplate
from miles_tito_deepseek.dsml import DeepSeekV4Family, DeepSeekV32Family
from miles_tito_deepseek.v31 import DeepSeekV31Family

DATA = Path(__file__).parent / "data"
KEPT = "reasoning of earlier turns is kept"
OPENER = "an earlier turn keeps the opener it was sampled with"
MIDDLE = "the template moves it to the front of the row; the family refuses it"
LOOPS_OFF = [f"off: {name}" for name, probe in CONVERSATIONS.items() if any(m.tool_calls for m in probe.messages)]


class TestDeepSeekV31(RecordedTemplate):
    family = DeepSeekV31Family
    recorded = DATA / "deepseek-v31.json"
    options = {"default": {}, "on": {"thinking": True}}
    differs = {
        **dict.fromkeys(
            (name for name, probe in CONVERSATIONS.items() if probe.tools),
            "the template leaves tools out; they are written as the model card says",
        ),
        "reasoning before a user": KEPT,
        "system in the middle": MIDDLE,
    }


class TestDeepSeekV32(RecordedTemplate):
    family = DeepSeekV32Family
    recorded = DATA / "deepseek-v32.json"
    options = {"default": {}, "off": {"thinking": False}}
    differs = {
        "two turns": OPENER,
        "three turns": OPENER,
        "reasoning before a user": KEPT,
        "system in the middle": MIDDLE,
        **dict.fromkeys(LOOPS_OFF, "the template writes one opener and keeps another; reasoning is kept"),
    }


class TestDeepSeekV4(RecordedTemplate):
    family = DeepSeekV4Family
    recorded = DATA / "deepseek-v4.json"
    options = {"default": {}, "off": {"thinking": False}}
    differs = {
        "off: reasoning before a user": KEPT,
        "system in the middle": MIDDLE,
        **dict.fromkeys(
            (name for name in LOOPS_OFF if "without" not in name), "reasoning is kept, also where thinking is off"
        ),
    }
