from __future__ import annotations

from pathlib import Path

from miles_core.testing.tito_reference import RecordedTemplate
from miles_tito_llama.families import Llama31Family

DATA = Path(__file__).parent / "data"


class TestLlama31(RecordedTemplate):
    family = Llama31Family
    recorded = DATA / "llama31.json"
    options = {"default": {}, "system": {"tools_in": "system"}}
    differs = {"tool loop": "the template drops words beside a call; the family refuses them"}
