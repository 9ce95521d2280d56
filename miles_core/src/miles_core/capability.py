"""What a plugin declares: capabilities, rules about them, and the names (kinds, tags) that both use.

All of it is plain data and needs only the standard library, so that listing what is installed never imports torch, ray
or pydantic. A capability does not say its kind or distribution: the registry knows them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

API = 1
"""Number of the plugin API. A plugin module states which one it was written for, as a literal: ``MILES_API = 1``."""

ENTRY_POINT_GROUP = "miles.plugins"


class State(StrEnum):
    """What the registry found out about a plugin or capability. A run-file can pick only what is ``ok``."""

    OK = "ok"
    DISABLED = "disabled"  # named in MILES_DISABLE_PLUGINS or plugins.disable; never imported
    UNAVAILABLE = "unavailable"  # a requirement in `needs` is not installed
    INCOMPATIBLE = "incompatible"  # other API version, or its Requires-Dist excludes this miles-core
    BROKEN = "broken"  # raised while loading
    CONFLICT = "conflict"  # another distribution claims the same kind and name


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A combination that does not work, as data; `conflicts` and `requires` are the usual ways to write one.

    The rule is broken when every condition of `when` holds and, if there are `needs`, at least one of them does not.
    A condition is ``path=value``, ``path in (a, b)``, or ``kind:tag``: the picked capability of that kind provides the
    tag. What conditions cannot say, such as arithmetic, goes into a function ``Facts -> Iterable[Finding]`` (see
    `miles_core.rules`) that `check` names; it runs only when every condition of `when` holds.
    """

    id: str
    because: str
    instead: str
    when: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    check: str | None = None


def conflicts(*when: str, id: str, because: str, instead: str) -> Rule:
    """A rule that is broken when all conditions in `when` hold."""
    return Rule(id=id, when=when, because=because, instead=instead)


def requires(*when: str, id: str, because: str, instead: str, **tags: str) -> Rule:
    """A rule that asks for tags when all conditions in `when` hold.

    Example:
        requires("rollout.routes=replay", engine="records-routes", id="r3", because="...", instead="...")
    """
    needs = tuple(f"{kind}:{tag}" for kind, tag in tags.items())
    return Rule(id=id, when=when, needs=needs, because=because, instead=instead)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """One thing that a plugin offers for a run-file to pick.

    Example:
        Capability(name="ring", summary="engines pass buckets on", load="miles_ring.transport:RingTransport",
                   options="miles_ring.options:RingOptions", provides=frozenset({"cross-host"}))
    """

    name: str
    """The name that a run-file picks it by: kebab-case, unique within its kind."""
    summary: str
    """When to choose it, in at most 80 characters."""
    load: str
    """``module:attribute`` of what does the work; imported only when a run picks it."""
    options: str | None = None
    """``module:PydanticModel`` of its options; None if it takes none."""
    provides: frozenset[str] = frozenset()
    """Tags (from `TAGS`) of what it can do. Rules ask for them; conformance kits test what is declared."""
    needs: tuple[str, ...] = ()
    """Requirements (PEP 508) beyond the distribution's. While one is missing, the capability is `unavailable`."""
    expects: tuple[tuple[str, str], ...] = ()
    """Modules that a run may find elsewhere, on other hosts or in another environment, each with what to do where it is
    absent. `miles plugins list` looks for them without importing; a run-file may pick the capability anyhow."""
    memory: str | None = None
    """Backends only: ``module:function`` that tells how much memory a rank will need (`planning.memory.Planner`).
    Without it, plans assume that every rank holds a whole replica."""
    rules: tuple[Rule, ...] = ()
    """What it cannot be combined with; checked only in runs that pick it."""
    stability: Literal["stable", "experimental"] = "stable"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of capability."""

    name: str
    hook: str
    """Name of the hook in `hookspecs` through which plugins offer it."""
    section: str | None
    """Where a run-file picks it, as a dotted path; None for kinds that no run-file names."""
    many: bool
    """Whether a run-file may pick several."""
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
        Kind("correction", "miles_corrections", "corrections", True, "trainer/rollout log-ratios to per-token weights"),
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
    """The name of the capability for a model class: ``qwen3-moe-for-causal-lm`` for ``Qwen3MoeForCausalLM``."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|_", "-", model_class)
    return words.lower()


TAGS: dict[str, str] = {
    # engine
    "records-routes": "returns the experts of every MoE layer for each token",
    "version-spans": "reports the weight version of every sampled token",
    "verifies-weights": "can overwrite its weights with noise and report a digest of every tensor",
    "stages-aside": "receives a weight version while it goes on serving the present one",
    "streams": "yields tokens as they are sampled",
    "pauses-in-place": "can freeze requests for a weight update and continue them over their old KV cache",
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
    "places-processes": "runs every rank and every engine in its own process",
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
