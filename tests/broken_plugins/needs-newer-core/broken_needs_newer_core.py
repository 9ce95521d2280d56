"""Its metadata excludes this core."""

from miles_core.plugin import Capability, hookimpl

MILES_API = 1


@hookimpl
def miles_filters():
    return [Capability(name="future", summary="for a test", load="math:sqrt")]
