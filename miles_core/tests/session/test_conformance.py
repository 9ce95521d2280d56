"""Core's own family and matchers keep the contracts of their kinds."""

from __future__ import annotations

from miles_core.kinds.matcher import Matcher
from miles_core.kinds.tito_family import TitoFamily
from miles_core.session.default_family import DefaultFamily
from miles_core.session.hermes import spell_tool_calls
from miles_core.session.matching import loose_tool_call, role_content_only, strict
from miles_core.testing.matcher import MatcherConformance
from miles_core.testing.tito_family import TitoFamilyConformance
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import ToolCall


class TestDefaultFamily(TitoFamilyConformance):
    def make(self, tokenizer: ChatTokenizer) -> TitoFamily:
        return DefaultFamily(None, tokenizer)

    def spell_call(self, name: str, arguments: str) -> str:
        return spell_tool_calls("", [ToolCall(id="c", name=name, arguments=arguments)])


class TestStrict(MatcherConformance):
    def make(self) -> Matcher:
        return strict


class TestLooseToolCall(MatcherConformance):
    def make(self) -> Matcher:
        return loose_tool_call


class TestRoleContentOnly(MatcherConformance):
    forgives = frozenset({"tool", "arguments", "order of a list", "type of a value", "number of calls", "call dropped"})

    def make(self) -> Matcher:
        return role_content_only
