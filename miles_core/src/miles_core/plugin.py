"""The one module a plugin author imports.

from miles_core.plugin import Capability, hookimpl

MILES_API = 1

@hookimpl
def miles_rewards():
    return [Capability(name="length", summary="prefers short answers", load="my_pkg.reward:length")]
"""

from miles_core.capability import Capability, Rule, conflicts, requires
from miles_core.hookspecs import hookimpl
from miles_core.rules import Facts, Finding

__all__ = ["Capability", "Facts", "Finding", "Rule", "conflicts", "hookimpl", "requires"]
