"""What must hold between keys of the core. Each check has an id. What a capability demands is a rule of that
capability."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from miles_core.config.model_folder import ModelFolder, ModelFolderError, read_model_folder
from miles_core.config.spec import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What checks look at."""

    spec: RunSpec
    tags: Mapping[str, frozenset[str]]
    """For each kind, the tags that the picked capabilities provide."""
    model: ModelFolder | None
    """None as long as the folder was not read, or if it cannot be read."""

    def provides(self, kind: str, tag: str) -> bool:
        return tag in self.tags.get(kind, frozenset())

    def with_model(self, path: Path) -> Setup:
        """The same setup with the figures of the model folder at `path`, if that can be read."""
        try:
            return replace(self, model=read_model_folder(path))
        except (ModelFolderError, OSError, ValueError):
            return self  # reported with the files


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One check that failed."""

    id: str
    path: str
    message: str
    do: str
    reads: tuple[str, ...] = ()
    """Every key involved. If one of them is wrong itself, the finding is not reported."""
    kinds: frozenset[str] = frozenset()
    """Kinds whose tags were asked for."""
    show: bool = True
    """Whether to show the value at `path`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A combination that cannot work."""

    id: str
    about: str
    """The demand, for the documentation."""
    path: str
    """The key to point at."""
    find: Callable[[Setup], str | None]
    """Says what is wrong in this setup, or None."""
    do: str
    reads: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()


def value_at(spec: RunSpec, path: str) -> Any:
    """The value at a dotted key as plain data, None inside an absent section."""
    found: Any = spec
    for part in path.split("."):
        found = None if found is None else getattr(found, part)
    return _plain(found)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value


# --- combinations -----------------------------------------------------------------------------------------------------


def _no_prompts(s: Setup) -> str | None:
    if s.spec.data is None and not s.provides("environment", "provides-prompts"):
        return f"the environment `{s.spec.environment.use}` brings no prompts, and there is no `data`"
    return None


def _no_reward(s: Setup) -> str | None:
    if not s.spec.rewards and s.provides("environment", "needs-rewards"):
        return f"the environment `{s.spec.environment.use}` scores nothing itself, and no reward is picked"
    return None


def _tracker_twice(s: Setup) -> str | None:
    names = [tracker.use for tracker in s.spec.tracking.trackers or ()]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        return f"`{twice[0]}` is picked {names.count(twice[0])} times, and both would write to one place"
    return None


def _minibatches(s: Setup) -> str | None:
    schedule = s.spec.schedule
    if schedule.minibatches > schedule.groups_per_step:
        return f"{schedule.groups_per_step} groups cannot be split among {schedule.minibatches} optimizer steps"
    return None


def _greedy_groups(s: Setup) -> str | None:
    if s.spec.rollout.sampling.temperature == 0 and s.spec.schedule.group_size > 1:
        return "at temperature 0 the trajectories of a group are all alike, so there is nothing to learn from"
    return None


def _warmup(s: Setup) -> str | None:
    total = s.spec.schedule.steps * s.spec.schedule.minibatches
    if s.spec.optimizer.warmup_steps > total:
        return f"the warm-up would outlast the run's {total} optimizer steps"
    return None


def _k1_in_loss(s: Setup) -> str | None:
    o = s.spec.objective
    if o.kl_coef > 0 and o.kl_in == "loss" and o.kl_estimator == "k1":
        return "as a loss, k1 has a gradient of mean 0: it would regularise nothing"
    return None


def _k3_in_reward(s: Setup) -> str | None:
    o = s.spec.objective
    if o.kl_coef > 0 and o.kl_in == "reward" and o.kl_estimator != "k1":
        return f"in the reward, the policy gradient of {o.kl_estimator} is not that of the KL; only that of k1 is"
    return None


def _reference(s: Setup) -> str | None:
    if s.spec.objective.kl_coef > 0 and not s.provides("backend", "reference-model"):
        return f"the backend `{s.spec.backend.use}` keeps no reference policy to measure a KL against"
    return None


def _multi_rank(s: Setup) -> str | None:
    ranks = s.spec.placement.trainer_ranks
    if ranks > 1 and not s.provides("backend", "multi-rank"):
        return f"the backend `{s.spec.backend.use}` trains on one rank"
    return None


def _verifies(s: Setup) -> str | None:
    if s.spec.check_weight_update_equal and not s.provides("engine", "verifies-weights"):
        return f"the engine `{s.spec.engine.use}` cannot report what weights it holds"
    return None


def _proves(s: Setup) -> str | None:
    if s.spec.weights.verify != "off" and not s.provides("engine", "verifies-weights"):
        return f"the engine `{s.spec.engine.use}` cannot report what weights it holds"
    return None


CHECKS: tuple[Check, ...] = (
    Check(
        id="MIL102",
        about="A run needs prompts, from `data` or from the environment.",
        path="environment",
        find=_no_prompts,
        do="set data, or pick an environment that provides prompts",
        reads=("data",),
        kinds=("environment",),
    ),
    Check(
        id="MIL103",
        about="An environment that scores nothing itself needs a reward.",
        path="rewards",
        find=_no_reward,
        do="add a reward: `rewards: [my_reward.py:score]`, or the name of an installed one",
        kinds=("environment", "reward"),
    ),
    Check(
        id="MIL104",
        about="A tracker is picked once.",
        path="tracking.trackers",
        find=_tracker_twice,
        do="keep one of them",
    ),
    Check(
        id="MIL201",
        about="Each minibatch holds at least one group.",
        path="schedule.minibatches",
        find=_minibatches,
        do="set schedule.minibatches to schedule.groups_per_step at most",
        reads=("schedule.groups_per_step",),
    ),
    Check(
        id="MIL202",
        about="A group needs trajectories that can differ.",
        path="rollout.sampling.temperature",
        find=_greedy_groups,
        do="set rollout.sampling.temperature above 0",
        reads=("schedule.group_size",),
    ),
    Check(
        id="MIL301",
        about="k1 is no loss.",
        path="objective.kl_estimator",
        find=_k1_in_loss,
        do="set objective.kl_estimator: k3, or objective.kl_in: reward",
        reads=("objective.kl_coef", "objective.kl_in"),
    ),
    Check(
        id="MIL302",
        about="In the reward, the KL is estimated by k1.",
        path="objective.kl_estimator",
        find=_k3_in_reward,
        do="set objective.kl_estimator: k1, or objective.kl_in: loss",
        reads=("objective.kl_coef", "objective.kl_in"),
    ),
    Check(
        id="MIL303",
        about="A KL needs a backend that keeps a reference policy.",
        path="objective.kl_coef",
        find=_reference,
        do="pick a backend that provides `reference-model`, or set objective.kl_coef: 0",
        kinds=("backend",),
    ),
    Check(
        id="MIL401",
        about="The warm-up ends before the run does.",
        path="optimizer.warmup_steps",
        find=_warmup,
        do="lower optimizer.warmup_steps, or raise schedule.steps",
        reads=("schedule.steps", "schedule.minibatches"),
    ),
    Check(
        id="MIL501",
        about="Several trainer ranks need a backend that trains on several.",
        path="placement.trainer_ranks",
        find=_multi_rank,
        do="set placement.trainer_ranks: 1, or pick a backend that provides `multi-rank`",
        kinds=("backend",),
    ),
    Check(
        id="MIL502",
        about="Comparing weights after an update needs an engine that reports them.",
        path="check_weight_update_equal",
        find=_verifies,
        do="set check_weight_update_equal: false, or pick an engine that provides `verifies-weights`",
        kinds=("engine",),
    ),
    Check(
        id="MIL506",
        about="Proving what an engine serves needs an engine that reports it.",
        path="weights.verify",
        find=_proves,
        do="set weights.verify: off, or pick an engine that provides `verifies-weights`",
        kinds=("engine",),
    ),
)


def run_checks(setup: Setup, given: Iterable[Check]) -> Iterator[Found]:
    """Everything that these checks find wrong between keys of the core."""
    for check in given:
        if message := check.find(setup):
            yield Found(
                id=check.id,
                path=check.path,
                message=message,
                do=check.do,
                reads=(check.path, *check.reads),
                kinds=frozenset(check.kinds),
            )
