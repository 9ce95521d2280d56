"""Whether Mooncake is installed, without importing it: two distributions bring the same module."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from miles_core.rules import Facts, Finding


def check(facts: Facts) -> Iterable[Finding]:
    if find_spec("mooncake") is None:
        yield Finding(path="transport", found="there is no module `mooncake` here")
