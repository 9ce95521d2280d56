from __future__ import annotations

from miles_core.testing.tito_declared import DeclaredFamilyKit
from miles_tito_gpt_oss.families import GptOssFamily


class TestGptOss(DeclaredFamilyKit):
    family = GptOssFamily
    roles = frozenset({"user", "assistant", "tool"})
