from __future__ import annotations

from miles_core.testing.tito_declared import DeclaredFamilyKit
from miles_tito_glm.families import Glm46Family, Glm47Family


class TestGlm46(DeclaredFamilyKit):
    family = Glm46Family


class TestGlm46Off(DeclaredFamilyKit):
    family = Glm46Family
    options = {"thinking": False}


class TestGlm47(DeclaredFamilyKit):
    family = Glm47Family


class TestGlm47Off(DeclaredFamilyKit):
    family = Glm47Family
    options = {"thinking": False}
