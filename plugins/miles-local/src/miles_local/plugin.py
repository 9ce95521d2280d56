"""Engine `local`: a Hugging Face model in this process, sampled with continuous batching."""

from miles_core.plugin import Capability, Rule, hookimpl

MILES_API = 1

EXACT_DTYPE = Rule(
    id="local-true-on-policy",
    when=("precision.true_on_policy=true",),
    needs=("engine.dtype=checkpoint",),
    because="true-on-policy is proven with both sides in the checkpoint's dtype",
    instead="leave engine.dtype out, or store the checkpoint in the dtype you want",
)


@hookimpl
def miles_engines() -> list[Capability]:
    return [
        Capability(
            name="local",
            summary="Hugging Face model in the engine's own process, CPU or one GPU; no server to run",
            load="miles_local.engine:LocalEngine",
            options="miles_local.options:LocalOptions",
            rules=(EXACT_DTYPE,),
            provides=frozenset(
                {
                    "version-spans",
                    "verifies-weights",
                    "stages-aside",
                    "streams",
                    "pauses-in-place",
                    "records-routes",
                    "true-on-policy",
                }
            ),
        )
    ]
