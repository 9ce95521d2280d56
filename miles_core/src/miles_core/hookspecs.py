"""Everything that can be replaced, one hook for each kind of part. Read from top to bottom, it is a tour of the system.

A hook takes no arguments and is called once, before any run exists. It returns descriptions (`Capability`), never
objects, so that what is installed can be listed, checked and explained without importing it. A run-file then picks
capabilities by name, and only what it picks is imported. An empty list means "nothing on this machine".

For each kind, `miles_core.kinds` has the Protocol that the object named by `load` must follow, and `miles_core.testing`
the conformance kit that proves it does. Hook wrappers, `tryfirst` and `trylast` are refused: no plugin may see or
reorder what another one offers.
"""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from collections.abc import Iterable

import pluggy

from miles_core.capability import Capability

PROJECT = "miles"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


# --- rollout: prompt -> session -> trajectory -> group ----------------------------------------------------------------


@hookspec
def miles_environments() -> Iterable[Capability]:
    """Run an episode, asking a session for the model's turns; may also bring the prompts. One per run.

    `load`: a class, see `kinds.environment.Environment`; created once in the driver, its `run` called for every
    trajectory.
    """


@hookspec
def miles_rewards() -> Iterable[Capability]:
    """Score a finished episode. Any number per run; the scores are weighted and summed.

    `load`: a plain or async function, see `kinds.reward.Reward`; called with a deadline, in a worker process that is
    killed when it passes. A run-file may also name a function of its own: ``module:attr`` or ``file.py:fn``.
    """


@hookspec
def miles_filters() -> Iterable[Capability]:
    """Keep or drop a finished group before it reaches the batch. Any number per run; a group must pass all of them.

    `load`: a plain function, see `kinds.filter.Filter`; called in the driver on every scored group.
    """


@hookspec
def miles_data_buffers() -> Iterable[Capability]:
    """Hold finished groups until the trainer takes them, in fully asynchronous runs. One per run.

    `load`: a class, see `kinds.data_buffer.DataBuffer`; created in the driver.
    """


@hookspec
def miles_engines() -> Iterable[Capability]:
    """Sample tokens with the log-prob and weight version of each. One per run.

    `load`: a class, see `kinds.engine.Engine`; created by the executor, once per engine replica.
    """


@hookspec
def miles_tito_families() -> Iterable[Capability]:
    """Turn messages into tokens, by appending only, and tokens into messages, for one model family. One per run: the
    one that the run-file picks, else the one that claims the checkpoint.

    `load`: a class, see `kinds.tito_family.TitoFamily`; created once and shared by all sessions.
    """


@hookspec
def miles_matchers() -> Iterable[Capability]:
    """Decide whether a message that an agent sends again is the one that its session stored. One per run.

    `load`: a plain function, see `kinds.matcher.Matcher`; must return a bool, anything else fails the request.
    """


# --- learning: group -> batch -> loss -> update -----------------------------------------------------------------------


@hookspec
def miles_advantages() -> Iterable[Capability]:
    """Turn rewards into per-token advantages. One per run.

    `load`: a pure function, see `kinds.advantage.Advantage`; called in the driver on the whole batch.
    """


@hookspec
def miles_corrections() -> Iterable[Capability]:
    """Turn the log-ratio between trainer and rollout into per-token weights. Any number per run; weights multiply.

    `load`: a pure function, see `kinds.correction.Correction`; called in the driver on the whole batch.
    """


@hookspec
def miles_losses() -> Iterable[Capability]:
    """The policy loss of each token. One per run; averaging over tokens is not the loss's business.

    `load`: a pure function, see `kinds.loss.Loss`; called in every trainer rank on each micro-batch.
    """


@hookspec
def miles_teachers() -> Iterable[Capability]:
    """Score a trajectory's tokens under another model, for distillation. No run-file reads this kind yet.

    `load`: a class, see `kinds.teacher.Teacher`.
    """


@hookspec
def miles_backends() -> Iterable[Capability]:
    """Train: compute log-probs, take optimizer steps, write checkpoints, export weights. One per run.

    `load`: a class, see `kinds.backend.Backend`; created by the executor in every trainer rank.
    """


@hookspec
def miles_architectures() -> Iterable[Capability]:
    """Map the tensors of one model architecture to backend `megatron`. No run-file names it: the checkpoint decides.

    `load`: an object, see `kinds.architecture.Architecture`. Its name is the model class in config.json, written as
    `capability.architecture_name` does.
    """


@hookspec
def miles_precisions() -> Iterable[Capability]:
    """Quantise exported weights exactly as an engine does. No run-file reads this kind yet.

    `load`: a class, see `kinds.precision.Precision`.
    """


# --- moving weights, placing work, watching it ------------------------------------------------------------------------


@hookspec
def miles_transports() -> Iterable[Capability]:
    """Move a complete weight version from the trainer to every engine, or nothing at all. One per run.

    `load`: a class, see `kinds.transport.Transport`; created in the driver.
    """


@hookspec
def miles_executors() -> Iterable[Capability]:
    """Start trainer ranks and engines, each in its place. One per run.

    `load`: a class, see `kinds.executor.Executor`; created in the driver.
    """


@hookspec
def miles_trackers() -> Iterable[Capability]:
    """Receive the metrics of every step. Any number per run; `metrics.jsonl` is written in any case.

    `load`: a class, see `kinds.tracker.Tracker`; created in the driver. One that raises is reported and switched off,
    and the run goes on.
    """


@hookspec
def miles_recipes() -> Iterable[Capability]:
    """A whole job beside the RL loop, such as supervised fine-tuning or distillation. No run-file reads this kind yet.

    `load`: a class, see `kinds.recipe.Recipe`.
    """
