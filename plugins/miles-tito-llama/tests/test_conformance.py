from __future__ import annotations

from miles_core.testing.tito_declared import DeclaredFamilyKit
from miles_tito_llama.families import Llama31Family


class TestLlama31(DeclaredFamilyKit):
    family = Llama31Family
