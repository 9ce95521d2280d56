"""Misspells its hook."""

from miles_core.plugin import Capability, hookimpl

MILES_API = 1


@hookimpl
def miles_filter():
    return [Capability(name="lost", summary="for a test", load="math:sqrt")]
