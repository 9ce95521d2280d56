"""Written for a plugin API that this core does not have."""

from miles_core.plugin import SomethingOfApi99  # noqa: F401

MILES_API = 99
