from __future__ import annotations

from miles_core.testing.tito_declared import DeclaredFamilyKit
from miles_tito_deepseek.dsml import DeepSeekV4Family, DeepSeekV32Family
from miles_tito_deepseek.v31 import DeepSeekV31Family


class TestV31(DeclaredFamilyKit):
    family = DeepSeekV31Family
    roles = frozenset({"user", "assistant", "tool"})


class TestV31On(DeclaredFamilyKit):
    family = DeepSeekV31Family
    options = {"thinking": True}
    roles = frozenset({"user", "assistant"})


class TestV32(DeclaredFamilyKit):
    family = DeepSeekV32Family
    roles = frozenset({"user", "assistant", "tool"})


class TestV32Off(DeclaredFamilyKit):
    family = DeepSeekV32Family
    options = {"thinking": False}
    roles = frozenset({"user", "assistant", "tool"})


class TestV4(DeclaredFamilyKit):
    family = DeepSeekV4Family
    roles = frozenset({"user", "assistant", "tool"})


class TestV4Off(DeclaredFamilyKit):
    family = DeepSeekV4Family
    options = {"thinking": False}
    roles = frozenset({"user", "assistant", "tool"})
