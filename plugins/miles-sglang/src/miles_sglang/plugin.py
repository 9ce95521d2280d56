"""Engine and teacher `sglang`: SGLang servers, started by Miles or attached by address."""

from miles_core.plugin import Capability, conflicts, hookimpl

MILES_API = 1

VERIFICATIONS = ("check_weight_update_equal=true", "weights.verify in (always, sampled)")
"""What asks an engine for digests of the weights it serves."""


@hookimpl
def miles_engines() -> list[Capability]:
    return [
        Capability(
            name="sglang",
            summary="SGLang servers, started by Miles or attached; for real GPUs and long runs",
            load="miles_sglang.engine:SglangEngine",
            options="miles_sglang.options:SglangOptions",
            provides=frozenset({"version-spans", "verifies-weights", "streams", "records-routes", "pauses-in-place"}),
            rules=tuple(
                conflicts(
                    verification,
                    "engine.tensor_parallel in (2, 3, 4, 6, 8, 16, 32, 64)",
                    id=f"sglang-digests-one-rank-{number}",
                    because="served weights are compared tensor by tensor, and a rank of several holds only slices",
                    instead="weights.verify: off and check_weight_update_equal: false, or engine.tensor_parallel: 1",
                )
                for number, verification in enumerate(VERIFICATIONS, 1)
            ),
        )
    ]


@hookimpl
def miles_teachers() -> list[Capability]:
    return [
        Capability(
            name="sglang",
            summary="scores rows on an SGLang server, started by Miles or attached",
            load="miles_sglang.teacher:SglangTeacher",
            options="miles_sglang.options:TeacherOptions",
        )
    ]
