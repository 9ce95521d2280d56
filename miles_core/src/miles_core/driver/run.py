"""Run: all parts and all state of a run. `assemble` opens it, and a loop such as `sync` drives it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_core.config.spec import RunSpec
from miles_core.data.order import PromptStream
from miles_core.driver.checkpoint import Checkpoint
from miles_core.driver.late_eval import LateEvaluations
from miles_core.driver.recorder import Recorder
from miles_core.driver.signals import StopRequest
from miles_core.kinds.data_buffer import BufferContext, DataBuffer
from miles_core.kinds.engine import Engine
from miles_core.kinds.executor import Executor, Trainer
from miles_core.restarts import RestartBudget
from miles_core.rollout.alarm import ConstantRewardAlarm
from miles_core.rollout.episode import Episodes
from miles_core.rollout.scheduler import GroupFilter
from miles_core.session.pool import EnginePool
from miles_core.tracking.run_dir import RunDir
from miles_core.types import Prompt
from miles_core.weights.fleet import Fleet

Pending = Callable[[], tuple[Mapping[str, Any], Callable[[Path], None]]]
"""Returns facts for a checkpoint, as JSON values, and a function that writes groups into the folder it is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """The functions of the update that the run-file picks, with their options."""

    advantage: Callable[..., Any]
    advantage_options: Mapping[str, Any]
    corrections: Sequence[tuple[str, Callable[..., Any], Mapping[str, Any]]]
    """Name, function and options of each."""


@dataclass(slots=True, kw_only=True)
class Run:
    spec: RunSpec
    directory: RunDir
    recorder: Recorder
    trainer: Trainer
    executor: Executor
    engines: list[Engine]
    """By number. An engine that replaces a lost one takes its place here."""
    pool: EnginePool
    """The same engines, as sessions use them."""
    fleet: Fleet
    """The same engines, as weight updates use them."""
    stream: PromptStream
    eval_prompts: Sequence[Prompt]
    episodes: Episodes
    filters: Sequence[GroupFilter]
    learning: Learning
    alarm: ConstantRewardAlarm
    num_experts: int | None
    """Experts of each MoE layer of the model; None for a dense model."""
    stop: StopRequest
    complete: bool = False
    """Whether the run was finished already when it was opened."""
    start_step: int = 0
    """Steps that were done before: those of the checkpoint that is resumed."""
    resumed_metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of `start_step`, from its checkpoint. The step's line is written again when its weights are published."""
    saved_step: int | None = None
    """The last step that this process saved or resumed."""
    version: int = -1
    """The weight version that the engines serve; -1 before the first publish."""
    published_step: int = -1
    """The step whose weights that version holds."""
    trained_step: int = 0
    """The step whose weights the trainer holds."""
    publishing: bool = False
    """Whether a weight update is going on."""
    not_before: dict[int, float] = field(default_factory=dict)
    """Engines that could not be started again, and the monotonic time before which nobody tries once more."""
    restarts: dict[int, asyncio.Task[Engine]] = field(default_factory=dict)
    """Engines that are being started in the places of lost ones."""
    replaced: dict[int, RestartBudget] = field(default_factory=dict)
    """How often each engine was replaced, and may be."""
    make_buffer: Callable[[BufferContext], DataBuffer]
    pending: Pending | None = None
    """What a checkpoint must keep of a rollout that goes on beside training; None when nothing does."""
    resumed: Checkpoint | None = None
    """The checkpoint that is resumed, if any."""
    late: LateEvaluations | None = None
    """Evaluation beside training; None if the engines that roll out also evaluate, or nothing does."""

    @property
    def last_step(self) -> int:
        return self.spec.schedule.steps

    def save_due(self, step: int) -> bool:
        every = self.spec.checkpoint.every_steps
        return step == self.last_step or (every is not None and step % every == 0)

    def eval_here(self, step: int) -> bool:
        """Whether the engines that roll out must evaluate after this step."""
        return self.late is None and self.eval_due(step)

    def eval_due(self, step: int) -> bool:
        every = self.spec.eval.every_steps
        return every is not None and (step == self.last_step or step % every == 0)
