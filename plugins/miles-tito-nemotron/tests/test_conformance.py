from __future__ import annotations

from miles_core.testing.tito_declared import DeclaredFamilyKit
from miles_tito_nemotron.families import Nemotron3Family


class TestNemotron3(DeclaredFamilyKit):
    family = Nemotron3Family


class TestNemotron3Off(DeclaredFamilyKit):
    family = Nemotron3Family
    options = {"thinking": False}
