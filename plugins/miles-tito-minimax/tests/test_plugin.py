from __future__ import annotations

from importlib import import_module

import pytest
from pydantic import ValidationError

from miles_tito_minimax.plugin import miles_tito_families

CAPABILITIES = list(miles_tito_families())


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda each: each.name)
def test_the_capability_names_what_exists(capability) -> None:  # type: ignore[no-untyped-def]
    for target in (capability.load, capability.options):
        module, _, name = target.partition(":")
        assert getattr(import_module(module), name).__module__ == module
    assert len(capability.summary) <= 80


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda each: each.name)
def test_unknown_options_are_refused(capability) -> None:  # type: ignore[no-untyped-def]
    module, _, name = capability.options.partition(":")
    with pytest.raises(ValidationError):
        getattr(import_module(module), name).model_validate({"no_such_option": 1})
