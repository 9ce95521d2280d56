from __future__ import annotations

from pathlib import Path

from miles_core.testing.tito_reference import RecordedTemplate, family_tokenizer
from miles_tito_gpt_oss.families import GptOssFamily

DATA = Path(__file__).parent / "data"
KEPT = "reasoning of earlier turns is kept"


class TestGptOss(RecordedTemplate):
    family = GptOssFamily
    recorded = DATA / "gpt-oss.json"
    options = {"default": {"date": "2026-01-02"}, "high": {"date": "2026-01-02", "reasoning_effort": "high"}}
    differs = {
        "tool loop": "the template refuses reasoning and content beside one call",
        "parallel calls": "the template drops all calls but the first; the family refuses them",
        "system in the middle": "the template drops it; the family refuses it",
        "reasoning before a user": KEPT,
    }

    def test_the_checkpoint_is_claimed_and_others_are_not(self, tmp_path: Path) -> None:
        """The published template needs a clock, so the claim goes by tokens and by the template's text."""
        identity = "You are ChatGPT, a large language model trained by OpenAI."
        parts = ["<|start|>developer", "<|channel|>analysis<|message|>", identity]
        for shown, claimed in ((parts, True), (parts[1:], False), (parts[:2], False), ([], False)):
            template = "{#" + "".join(shown) + "#}{{ '' }}"
            tokenizer = family_tokenizer(GptOssFamily, tmp_path, template=template)
            assert GptOssFamily.claims(tokenizer) is claimed
