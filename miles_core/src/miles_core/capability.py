"""What a plugin declares: capabilities, rules, and the vocabulary both are written in.

Everything here is plain data over the standard library, so that listing what is installed never imports torch, ray or
pydantic. The registry stamps the kind and the distribution; a capability does not repeat them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

API = 1
"""The plugin API of this core. A plugin module states the one it was written for as a literal: ``MILES_API = 1``."""

ENTRY_POINT_GROUP = "miles.plugins"


class State(StrEnum):
    """What the registry found out about a capability or plugin. Only ``ok`` can be picked by a run-file."""

    OK = "ok"
    DISABLED = "disabled"  # named in MILES_DISABLE_PLUGINS or plugins.disable; never imported
    UNAVAILABLE = "unavailable"  # a requirement in `needs` is not installed
    INCOMPATIBLE = "incompatible"  # other API version, or its Requires-Dist excludes this miles-core
    BROKEN = "broken"  # raised while loading
    CONFLICT = "conflict"  # another distribution claims the same kind and name


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One fact about combinations, as data.

    It fires when all of `when` hold and, if `needs` is given, some `needs` does not. A condition is ``path=value``,
    ``path in (a, b)`` or ``kind:tag`` (the picked capability of that kind provides the tag). `check` names a function
    ``Facts -> Iterable[Finding]`` (`miles_core.rules`) for what data cannot say (arithmetic); use it last. It runs only
    when all of `when` hold.
    """

    id: str
    because: str
    instead: str
    when: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    check: str | None = None


def conflicts(*when: str, id: str, because: str, instead: str) -> Rule:
    """Forbid the combination of all conditions in `when`."""
    return Rule(id=id, when=when, because=because, instead=instead)


def requires(*when: str, id: str, because: str, instead: str, **tags: str) -> Rule:
    """When all of `when` hold, each kind must provide a tag: ``requires("a.b=c", engine="records-routes")``."""
    needs = tuple(f"{kind}:{tag}" for kind, tag in tags.items())
    return Rule(id=id, when=when, needs=needs, because=because, instead=instead)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """One named thing a plugin offers for a kind.

    Example:
        Capability(name="ring", summary="engines pass buckets on", load="miles_ring.transport:RingTransport",
                   options="miles_ring.options:RingOptions", provides=frozenset({"cross-host"}))
    """

    name: str
    """Kebab-case name the run-file picks; unique within its kind."""
    summary: str
    """At most 80 characters; says when to choose it."""
    load: str
    """``module:attribute``, imported only when a run picks it."""
    options: str | None = None
    """``module:PydanticModel`` of its options, or None when it takes none."""
    provides: frozenset[str] = frozenset()
    """Tags from `TAGS` that rules and conformance kits key on."""
    needs: tuple[str, ...] = ()
    """Requirements (PEP 508) beyond the distribution's own; missing ones make the capability `unavailable`."""
    memory: str | None = None
    """Of a backend: ``module:function`` that says what a rank will hold (`planning.memory.Planner`), for plans. Without
    it, they take every rank for a whole replica."""
    rules: tuple[Rule, ...] = ()
    """In force only while this capability is picked."""
    stability: Literal["stable", "experimental"] = "stable"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of capability: its hook, where a run-file picks it, and how many."""

    name: str
    hook: str
    section: str | None
    """Dotted path in the run-file, or None while no reader exists in this release."""
    many: bool
    summary: str


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("backend", "miles_backends", "backend", False, "trains: log-probs, gradient steps, weight export"),
        Kind("engine", "miles_engines", "engine", False, "samples tokens with their log-probs and weight versions"),
        Kind("transport", "miles_transports", "transport", False, "moves a complete weight version to every engine"),
        Kind("tito_family", "miles_tito_families", "session.family", False, "turns messages into tokens and back"),
        Kind(
            "matcher",
            "miles_matchers",
            "session.matcher",
            False,
            "tells whether a replayed message is the stored one",
        ),
        Kind("advantage", "miles_advantages", "advantage", False, "rewards to per-token advantages"),
        Kind("correction", "miles_corrections", "corrections", True, "log-ratios to per-token weights"),
        Kind("loss", "miles_losses", "loss", False, "per-token policy loss"),
        Kind("teacher", "miles_teachers", None, True, "scores a trajectory's tokens for distillation"),
        Kind("environment", "miles_environments", "environment", False, "runs one episode against a session"),
        Kind("reward", "miles_rewards", "rewards", True, "scores a finished episode"),
        Kind("filter", "miles_filters", "rollout.filters", True, "keeps or drops finished groups"),
        Kind(
            "data_buffer",
            "miles_data_buffers",
            "schedule.buffer",
            False,
            "holds finished groups between rollout and trainer",
        ),
        Kind("architecture", "miles_architectures", None, False, "maps a checkpoint's tensors to backend megatron"),
        Kind("precision", "miles_precisions", None, False, "quantises weights for an engine"),
        Kind("executor", "miles_executors", "executor", False, "places trainer ranks and engines"),
        Kind("tracker", "miles_trackers", "tracking.trackers", True, "receives metrics"),
        Kind("recipe", "miles_recipes", None, False, "a complete job shape"),
    )
}


def architecture_name(model_class: str) -> str:
    """Name of an architecture's capability: ``Qwen3MoeForCausalLM`` is ``qwen3-moe-for-causal-lm``."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|_", "-", model_class)
    return words.lower()


TAGS: dict[str, str] = {
    # engine
    "records-routes": "returns the experts of every MoE layer for each token",
    "version-spans": "reports the weight version of every sampled token",
    "verifies-weights": "can scramble its weights and report a digest of every tensor",
    "stages-aside": "receives a weight version beside the one it goes on serving",
    "streams": "yields tokens as they are sampled",
    "pauses-in-place": "can freeze requests for a weight update and go on over their old KV",
    "reads-disk": "can load a published checkpoint from a folder",
    # engine and backend
    "true-on-policy": "computes log-probs with the batch-invariant kernels that both sides share",
    # backend
    "replays-routes": "forces recorded experts in its forward pass",
    "multi-rank": "trains on more than one rank",
    "reference-model": "keeps a frozen reference policy for KL",
    "critic": "trains a value model",
    "reads-tables": "loads checkpoints by the tables of kind architecture",
    # transport
    "same-process": "only between objects of one process",
    "cross-process": "works between processes of one host",
    "cross-host": "works between hosts",
    # executor
    "places-processes": "gives every rank and engine a process of its own",
    # environment
    "provides-prompts": "brings its own prompts, so the run-file needs no `data`",
    "multi-turn": "asks the session for more than one completion",
    "needs-rewards": "scores nothing itself, so the run-file must pick a reward",
    # advantage, loss
    "needs-values": "reads a critic's values",
    "needs-group": "compares several trajectories of one prompt",
    "needs-old-logprobs": "reads the log-probs of the old policy",
}
"""Every tag a rule or a conformance kit may name. A tag outside this table is a lint error."""
