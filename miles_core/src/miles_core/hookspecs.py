"""Everything that can be replaced, one hook per kind; reading top to bottom is the tour of the system.

Every hook takes no arguments, is called once before any run exists, and returns descriptors (`Capability`), never
objects: what is installed can be listed, checked and explained without importing any of it. A run-file then picks by
name, and only the picked capability's `load` is imported. Returning an empty list means "nothing on this machine".

What `load` must resolve to is the Protocol of the same name in `miles_core.kinds`; the kit that proves it is in
`miles_core.testing`. Hook wrappers, `tryfirst` and `trylast` are refused: no plugin may see or reorder another's
answer.
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
    """Run one episode against a session, and perhaps bring the prompts. One per run.

    `load`: a class, see `kinds.environment.Environment`; created once in the driver, `run` once per trajectory.
    """


@hookspec
def miles_rewards() -> Iterable[Capability]:
    """Score a finished episode. One to many per run; weighted and summed.

    `load`: a plain or async function, see `kinds.reward.Reward`; called in a killable worker process with a deadline.
    The run-file may also name a function directly: ``module:attr`` or ``file.py:fn``.
    """


@hookspec
def miles_filters() -> Iterable[Capability]:
    """Keep or drop a finished group before it reaches the batch. None to many per run; all must keep.

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
    """Turn messages into tokens and back for one model family, append-only. One per run, picked or claimed.

    `load`: a class, see `kinds.tito_family.TitoFamily`; created once, owned by the session layer.
    """


@hookspec
def miles_matchers() -> Iterable[Capability]:
    """Decide whether a replayed message is the stored one. One per run.

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
    """Turn the log-ratio between trainer and rollout into per-token weights. None to many per run; weights multiply.

    `load`: a pure function, see `kinds.correction.Correction`; called in the driver on the whole batch.
    """


@hookspec
def miles_losses() -> Iterable[Capability]:
    """The per-token policy loss. One per run; reduction is separate and not a loss's business.

    `load`: a pure function, see `kinds.loss.Loss`; called in every trainer rank on each micro-batch.
    """


@hookspec
def miles_teachers() -> Iterable[Capability]:
    """Score a trajectory's tokens under another model, for distillation. None to many per run.

    `load`: a class, see `kinds.teacher.Teacher`.
    """


@hookspec
def miles_backends() -> Iterable[Capability]:
    """Train: log-probs, gradient steps, checkpoints, weight export. One per run.

    `load`: a class, see `kinds.backend.Backend`; created by the executor, once per trainer rank; synchronous.
    """


@hookspec
def miles_architectures() -> Iterable[Capability]:
    """Map checkpoints of one architecture to backend `megatron`. One per run, found by the checkpoint.

    `load`: an object, see `kinds.architecture.Architecture`. Its name is the class in config.json's `architectures`,
    as `capability.architecture_name` writes it; nothing in a run-file names it.
    """


@hookspec
def miles_precisions() -> Iterable[Capability]:
    """Quantise exported weights exactly as an engine does. One per run.

    `load`: a class, see `kinds.precision.Precision`.
    """


# --- moving weights, placing work, watching it ------------------------------------------------------------------------


@hookspec
def miles_transports() -> Iterable[Capability]:
    """Move a complete weight version from trainer to every engine, or nothing. One per run.

    `load`: a class, see `kinds.transport.Transport`; created in the driver, opened once, publishes after each update.
    """


@hookspec
def miles_executors() -> Iterable[Capability]:
    """Place trainer ranks and engines. One per run.

    `load`: a class, see `kinds.executor.Executor`.
    """


@hookspec
def miles_trackers() -> Iterable[Capability]:
    """Receive the metrics of every step. None to many per run, beside the metrics.jsonl that is always written.

    `load`: a class, see `kinds.tracker.Tracker`; a tracker that raises is reported and switched off, the run goes on.
    """


@hookspec
def miles_recipes() -> Iterable[Capability]:
    """A complete job shape (SFT, distillation, diffusion) beyond the RL loop.

    `load`: a class, see `kinds.recipe.Recipe`.
    """
