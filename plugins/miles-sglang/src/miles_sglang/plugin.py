"""Engine and teacher `sglang`: SGLang servers, started by Miles or attached by address."""

from miles_core.plugin import Capability, Rule, conflicts, hookimpl

MILES_API = 1

VERIFICATIONS = ("check_weight_update_equal=true", "weights.verify in (always, sampled)")
"""What asks an engine for digests of the weights it serves."""

RULES = (
    *(
        Rule(
            id=f"sglang-digests-one-rank-{number}",
            when=(verification,),
            check="miles_sglang.rules:one_rank",
            because="served weights are compared tensor by tensor, and a rank of several holds only slices",
            instead="weights.verify: off and check_weight_update_equal: false, or engine.tensor_parallel: 1",
        )
        for number, verification in enumerate(VERIFICATIONS, 1)
    ),
    Rule(
        id="sglang-starts",
        check="miles_sglang.rules:sglang_is_there",
        because="Miles starts the servers with it",
        instead="engine.python: the Python of an environment that SGLang is installed in, or engine.urls of servers "
        "that run already",
    ),
    Rule(
        id="sglang-attached-not-started",
        check="miles_sglang.rules:starting_is_ours",
        because="how an attached server is started is decided where it is started, so nothing reads the option",
        instead="no engine.urls, or the flag on the server's own command line",
    ),
    Rule(
        id="sglang-addresses",
        check="miles_sglang.rules:addresses_fit",
        because="each engine attaches to one server, and each server is one engine's",
        instead="as many different addresses, such as http://host:30000, as placement.engines",
    ),
    conflicts(
        "engine.backend=nccl",
        "engine.update in (disk, tensor)",
        id="sglang-backend-distributed",
        because="only updates by broadcast use the library, so nothing reads the option",
        instead="engine.update: distributed, or no engine.backend",
    ),
    Rule(
        id="sglang-deterministic-min-p",
        when=("engine.deterministic=true",),
        check="miles_sglang.rules:no_min_p",
        because="SGLang has no min-p in deterministic mode, and a request for it would end the server",
        instead="min_p: 0, or engine.deterministic: false",
    ),
)
EXPECTS = (("sglang", "name the Python of an environment that has it, as `python`, or servers that run already"),)


@hookimpl
def miles_engines() -> list[Capability]:
    return [
        Capability(
            name="sglang",
            summary="SGLang servers, started by Miles or attached; for real GPUs and long runs",
            load="miles_sglang.engine:SglangEngine",
            options="miles_sglang.options:SglangOptions",
            expects=EXPECTS,
            provides=frozenset(
                {"version-spans", "verifies-weights", "streams", "records-routes", "pauses-in-place", "stages-aside"}
            ),
            rules=RULES,
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
            expects=EXPECTS,
        )
    ]
