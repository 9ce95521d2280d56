from __future__ import annotations

from miles_core.testing.tito_declared import DeclaredFamilyKit
from miles_tito_minimax.families import MiniMaxM2Family


class TestMiniMaxM2(DeclaredFamilyKit):
    family = MiniMaxM2Family
    roles = frozenset({"user", "assistant", "tool"})
