"""Core's own capabilities, declared through the same hooks and entry point as everybody else's. Cannot be disabled."""

from __future__ import annotations

from collections.abc import Iterable

from miles_core.plugin import Capability, Rule, conflicts, hookimpl, requires

MILES_API = 1

_ADVANTAGES = "miles_core.algorithms.advantages"
_LOSSES = "miles_core.algorithms.losses"
_CORRECTIONS = "miles_core.algorithms.corrections"
_OPTIONS = "miles_core.options"


def _group_rule(name: str) -> Rule:
    return conflicts(
        "schedule.group_size=1",
        id=f"{name}-needs-group",
        because=f"{name} compares the trajectories of one prompt, and with one trajectory every advantage is 0",
        instead="set schedule.group_size to 2 or more, or advantage: reinforce-pp",
    )


def _recompute_rule(name: str) -> Rule:
    return conflicts(
        "objective.old_logprobs=rollout",
        id=f"{name}-needs-trainer-logprobs",
        because="the ratio of trainer to rollout needs the trainer's own log-probs, which this run does not compute",
        instead="set objective.old_logprobs: trainer, or remove the correction",
    )


@hookimpl
def miles_environments() -> Iterable[Capability]:
    return [
        Capability(
            name="chat",
            summary="one prompt, one answer; rewards score it",
            load="miles_core.rollout.chat:ChatEnvironment",
            provides=frozenset({"needs-rewards"}),
        ),
        Capability(
            name="agent",
            summary="an agent program of yours, unmodified, against the session served over HTTP",
            load="miles_core.rollout.agent:AgentEnvironment",
            options=f"{_OPTIONS}:AgentOptions",
            provides=frozenset({"multi-turn"}),
            rules=(
                Rule(
                    id="agent-starts",
                    check="miles_core.rollout.agent_rule:agent_starts",
                    because="without it every episode would fail",
                    instead="name what is there; relative paths start where you start miles",
                ),
            ),
        ),
    ]


@hookimpl
def miles_rewards() -> Iterable[Capability]:
    return [
        Capability(
            name="http",
            summary="a score from a server of yours",
            load="miles_core.rollout.remote_reward:http_reward",
            options=f"{_OPTIONS}:HttpRewardOptions",
        )
    ]


@hookimpl
def miles_data_buffers() -> Iterable[Capability]:
    return [
        Capability(
            name="bounded",
            summary="first in, first out, bounded; a full one holds the rollout back",
            load="miles_core.rollout.buffer:BoundedBuffer",
            options=f"{_OPTIONS}:BoundedBufferOptions",
        )
    ]


@hookimpl
def miles_filters() -> Iterable[Capability]:
    return [
        Capability(
            name="nonzero-std",
            summary="drops groups whose rewards are all equal (dynamic sampling)",
            load="miles_core.rollout.filters:nonzero_std",
            options=f"{_OPTIONS}:NonzeroStdOptions",
        ),
        Capability(
            name="no-failures",
            summary="drops groups in which any trajectory failed",
            load="miles_core.rollout.filters:no_failures",
        ),
    ]


@hookimpl
def miles_tito_families() -> Iterable[Capability]:
    return [
        Capability(
            name="default",
            summary="best effort for any chat template that only ever appends; claims nothing",
            load="miles_core.session.default_family:DefaultFamily",
        )
    ]


@hookimpl
def miles_matchers() -> Iterable[Capability]:
    return [
        Capability(
            name="strict",
            summary="role, content, reasoning and tool calls must be equal; the safe choice",
            load="miles_core.session.matching:strict",
        ),
        Capability(
            name="loose-tool-call",
            summary="tool-call arguments are compared as JSON values; for agents that re-serialise",
            load="miles_core.session.matching:loose_tool_call",
        ),
        Capability(
            name="role-content-only",
            summary="role and content alone; dangerous: calls of different tools look alike",
            load="miles_core.session.matching:role_content_only",
        ),
    ]


@hookimpl
def miles_advantages() -> Iterable[Capability]:
    group = frozenset({"needs-group"})
    return [
        Capability(
            name="grpo",
            summary="reward minus group mean, over group std; the usual choice",
            load=f"{_ADVANTAGES}:grpo",
            options=f"{_OPTIONS}:GrpoOptions",
            provides=group,
            rules=(_group_rule("grpo"),),
        ),
        Capability(
            name="dr-grpo",
            summary="reward minus group mean, no std; pair with reduction: fixed-length",
            load=f"{_ADVANTAGES}:dr_grpo",
            provides=group,
            rules=(_group_rule("dr-grpo"),),
        ),
        Capability(
            name="rloo",
            summary="reward minus the mean of the group's others; unbiased for small groups",
            load=f"{_ADVANTAGES}:rloo",
            provides=group,
            rules=(_group_rule("rloo"),),
        ),
        Capability(
            name="reinforce-pp",
            summary="batch-normalised returns without groups; works with group_size 1",
            load=f"{_ADVANTAGES}:reinforce_pp",
            options=f"{_OPTIONS}:ReinforcePPOptions",
        ),
        Capability(
            name="reinforce-pp-baseline",
            summary="reward minus group mean, normalised over the batch",
            load=f"{_ADVANTAGES}:reinforce_pp_baseline",
            provides=group,
            rules=(_group_rule("reinforce-pp-baseline"),),
        ),
        Capability(
            name="gae",
            summary="a critic's values, per token; for PPO",
            load=f"{_ADVANTAGES}:gae",
            options=f"{_OPTIONS}:GaeOptions",
            provides=frozenset({"needs-values"}),
            rules=(
                requires(
                    backend="critic",
                    id="gae-needs-critic",
                    because="GAE reads a critic's values, and this backend trains none",
                    instead="choose a backend that provides `critic`, or advantage: grpo",
                ),
            ),
        ),
    ]


@hookimpl
def miles_losses() -> Iterable[Capability]:
    old = frozenset({"needs-old-logprobs"})
    return [
        Capability(
            name="ppo-clip",
            summary="clipped surrogate with separate bounds and optional dual clip; the usual choice",
            load=f"{_LOSSES}:ppo_clip",
            options=f"{_OPTIONS}:PpoClipOptions",
            provides=old,
        ),
        Capability(
            name="gspo",
            summary="one ratio per sequence; steadier for mixture-of-experts models",
            load=f"{_LOSSES}:gspo",
            options=f"{_OPTIONS}:GspoOptions",
            provides=old,
        ),
        Capability(
            name="cispo",
            summary="clips the weight, not the gradient; keeps rare tokens learning",
            load=f"{_LOSSES}:cispo",
            options=f"{_OPTIONS}:CispoOptions",
            provides=old,
        ),
    ]


@hookimpl
def miles_corrections() -> Iterable[Capability]:
    return [
        Capability(
            name="tis",
            summary="truncated importance sampling: outliers count less, none is lost",
            load=f"{_CORRECTIONS}:tis",
            options=f"{_OPTIONS}:TisOptions",
            rules=(_recompute_rule("tis"),),
        ),
        Capability(
            name="clip-or-pop",
            summary="tokens whose ratio leaves the interval leave the gradient",
            load=f"{_CORRECTIONS}:clip_or_pop",
            options=f"{_OPTIONS}:ClipOrPopOptions",
            rules=(_recompute_rule("clip-or-pop"),),
        ),
        Capability(
            name="importance",
            summary="the general form: ratio of token, sequence or its mean; truncate, mask or veto",
            load=f"{_CORRECTIONS}:importance",
            options=f"{_OPTIONS}:ImportanceOptions",
            rules=(_recompute_rule("importance"),),
        ),
        Capability(
            name="metrics-only",
            summary="measures the train/rollout ratio and changes nothing",
            load=f"{_CORRECTIONS}:metrics_only",
            rules=(_recompute_rule("metrics-only"),),
        ),
    ]


@hookimpl
def miles_executors() -> Iterable[Capability]:
    return [
        Capability(
            name="inprocess",
            summary="trainer and engines in the driver's process; for one device or a laptop",
            load="miles_core.executors.inprocess:InProcessExecutor",
            rules=(
                Rule(
                    id="inprocess-one-rank",
                    needs=("placement.trainer_ranks=1",),
                    because="one process holds one trainer rank",
                    instead="set placement.trainer_ranks: 1, or executor: ray",
                ),
            ),
        )
    ]


@hookimpl
def miles_trackers() -> Iterable[Capability]:
    return [
        Capability(
            name="tensorboard",
            summary="scalars under the run directory, for tensorboard --logdir",
            load="miles_core.tracking.tensorboard:TensorBoardTracker",
            needs=("tensorboard",),
        )
    ]
