from __future__ import annotations

from miles_core.testing.tito_declared import DeclaredFamilyKit
from miles_tito_qwen.families import Qwen3CoderFamily, Qwen3Family, Qwen3ThinkingFamily, Qwen35Family


class TestQwen3(DeclaredFamilyKit):
    family = Qwen3Family


class TestQwen3Off(DeclaredFamilyKit):
    family = Qwen3Family
    options = {"thinking": False}


class TestQwen3Thinking(DeclaredFamilyKit):
    family = Qwen3ThinkingFamily


class TestQwen35(DeclaredFamilyKit):
    family = Qwen35Family
    roles = frozenset({"user", "assistant", "tool"})


class TestQwen35Off(DeclaredFamilyKit):
    family = Qwen35Family
    options = {"thinking": False}
    roles = frozenset({"user", "assistant", "tool"})


class TestQwen3Coder(DeclaredFamilyKit):
    family = Qwen3CoderFamily
