"""The conformance kit of a family built on `tito.family.DeclaredFamily`: it knows the tokenizer and the spelling.

class TestQwen3(DeclaredFamilyKit):
    family = Qwen3Family
    options = {"thinking": False}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from miles_core.errors import BranchNeeded, MilesError
from miles_core.testing.tito_family import APPENDED, TitoFamilyConformance
from miles_core.testing.tito_reference import family_tokenizer
from miles_core.tito.family import DeclaredFamily
from miles_core.tito.probes import ADD, ADD_CALL, ANSWER, MORE, USER
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Message


class DeclaredFamilyKit(TitoFamilyConformance):
    """Subclass it with the family's class and, where they are not the defaults, its options."""

    family: ClassVar[type[DeclaredFamily[Any]]]
    options: ClassVar[Mapping[str, Any]] = {}

    def make(self, tokenizer: ChatTokenizer, **options: Any) -> DeclaredFamily[Any]:
        default = self.family.for_checkpoint(tokenizer)
        return self.family(type(default.options).model_validate({**self.options, **options}), tokenizer)

    def tokenizer(self, folder: Path) -> ChatTokenizer:
        return family_tokenizer(self.family, folder, template="{{ '' }}")

    @property
    def refuses(self) -> frozenset[str]:  # type: ignore[override]
        """What holds a role that the family does not append."""
        roles = self.roles
        return frozenset(name for name, messages in APPENDED.items() if not {m.role for m in messages} <= roles)

    roles: ClassVar[frozenset[str]] = frozenset({"user", "assistant", "tool", "system"})
    """Roles the family appends; the kit holds it to them."""

    def test_its_roles_are_those_it_declares(self, tmp_path: Path) -> None:
        assert self.make(self.tokenizer(tmp_path)).appendable == self.roles

    def test_a_call_cut_off_anywhere_loses_no_character(self, tmp_path: Path) -> None:
        family = self.make(self.tokenizer(tmp_path))
        said = Message(role="assistant", tool_calls=(ADD_CALL,))
        if family.calls is None:
            pytest.skip("the family reads no tool calls")
        try:
            family.render([USER], [ADD])
        except MilesError:
            pytest.skip("the family refuses tools with these options")
        text = family.spell(said)
        lead = self._lead(family)
        call = text.removeprefix(lead)
        for cut in range(1, len(call) - len(family.calls.closing or "}")):
            found = family.parse(family.tokenizer.encode(lead + call[:cut]), [ADD])
            assert not found.tool_calls, f"{call[:cut]!r} was read as {found.tool_calls}"
            assert found.content == call[:cut], f"{call[:cut]!r} came back as {found.content!r}"

    def test_earlier_reasoning_is_kept_or_starts_a_branch(self, tmp_path: Path) -> None:
        tokenizer = self.tokenizer(tmp_path)
        family = self.make(tokenizer)
        thought = Message(role="assistant", content="4", reasoning="Two and two.")
        plain = family.render([USER, ANSWER, MORE])
        if "earlier_reasoning" not in type(family.options).model_fields:
            assert family.earlier_reasoning() == "keep"
            assert family.append([USER, thought], [MORE]) == family.append([USER, ANSWER], [MORE])
            return
        kept = family.text([USER, thought, MORE])
        assert "Two and two." in kept
        family.append([USER, thought], [MORE])
        branching = self.make(tokenizer, earlier_reasoning="branch")
        with pytest.raises(BranchNeeded, match="forgets earlier reasoning"):
            branching.append([USER, thought], [MORE])
        assert "Two and two." not in branching.text([USER, thought, MORE])
        assert "Two and two." in branching.text([USER, thought], opener=False) or branching.forgets_before(
            [USER, thought]
        )
        assert family.render([USER, ANSWER, MORE]) == plain
