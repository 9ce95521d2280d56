"""What this distribution offers to Miles."""

from miles_core.plugin import Capability, conflicts, hookimpl

MILES_API = 1


@hookimpl
def miles_rewards():
    return [
        Capability(
            name="acme-length",
            summary="prefers answers near a length",
            load="acme_miles_length.reward:near_length",
            options="acme_miles_length.options:LengthOptions",
            rules=(
                conflicts(
                    "advantage.use=rloo",
                    id="acme-length-no-rloo",
                    because="a rule for a test",
                    instead="advantage: grpo",
                ),
            ),
        ),
        Capability(
            name="acme-judge",
            summary="asks a judge that is not installed here",
            load="acme_miles_length.judge:judge",
            needs=("acme-judge>=3",),
        ),
    ]
