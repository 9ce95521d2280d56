from __future__ import annotations

from miles_core.testing.tito_declared import DeclaredFamilyKit
from miles_tito_kimi.families import KimiK2Family, KimiK2ThinkingFamily, KimiK25Family


class TestKimiK2(DeclaredFamilyKit):
    family = KimiK2Family


class TestKimiK2Thinking(DeclaredFamilyKit):
    family = KimiK2ThinkingFamily


class TestKimiK25(DeclaredFamilyKit):
    family = KimiK25Family


class TestKimiK25Off(DeclaredFamilyKit):
    family = KimiK25Family
    options = {"thinking": False}
