"""Claims the same name as claims-a."""

from miles_core.plugin import Capability, hookimpl

MILES_API = 1


@hookimpl
def miles_filters():
    return [Capability(name="twice", summary="for a test", load="math:sqrt")]
