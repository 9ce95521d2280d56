"""Run: everything a loop holds while it goes. Opened by `assemble`, driven by `sync`; its parts know nothing of it."""

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
from miles_core.rollout.alarm import ConstantRewardAlarm
from miles_core.rollout.episode import Episodes
from miles_core.rollout.scheduler import GroupFilter
from miles_core.session.pool import EnginePool
from miles_core.tracking.run_dir import RunDir
from miles_core.types import Prompt
from miles_core.weights.fleet import Fleet


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """The picked functions of the update, bound to nothing: options travel beside them."""

    advantage: Callable[..., Any]
    advantage_options: Mapping[str, Any]
    corrections: Sequence[tuple[str, Callable[..., Any], Mapping[str, Any]]]


@dataclass(slots=True, kw_only=True)
class Run:
    spec: RunSpec
    directory: RunDir
    recorder: Recorder
    trainer: Trainer
    executor: Executor
    engines: list[Engine]
    """By index; a lost one is replaced here."""
    pool: EnginePool
    """The same engines as sessions see them."""
    fleet: Fleet
    stream: PromptStream
    eval_prompts: Sequence[Prompt]
    episodes: Episodes
    filters: Sequence[GroupFilter]
    learning: Learning
    alarm: ConstantRewardAlarm
    num_experts: int | None
    """Experts of an MoE layer of the model, None for a dense one."""
    stop: StopRequest
    complete: bool = False
    """Whether the run found itself finished: nothing is left to do, not even for the last step."""
    start_step: int = 0
    """Steps that are done; their weights are version `start_step`."""
    resumed_metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of `start_step` as its checkpoint remembers them; the step's line is written again after publishing."""
    saved_step: int | None = None
    version: int = -1
    """Weight version the engines serve; -1 before the first publish."""
    published_step: int = -1
    """Step whose weights that version holds."""
    trained_step: int = 0
    """Step whose weights the trainer holds."""
    publishing: bool = False
    not_before: dict[int, float] = field(default_factory=dict)
    """Engines that could not be started again, and the monotonic time before which nobody tries anew."""
    restarts: dict[int, asyncio.Task[Engine]] = field(default_factory=dict)
    """Engines being started in the places of lost ones."""
    make_buffer: Callable[[BufferContext], DataBuffer]
    pending: Callable[[], tuple[Mapping[str, Any], Callable[[Path], None]]] | None = None
    """What a checkpoint must remember of a rollout that is under way: JSON values, and how to write its groups."""
    resumed: Checkpoint | None = None
    late: LateEvaluations | None = None
    """Evaluation beside training; None where it runs on the engines that roll out, or not at all."""

    @property
    def last_step(self) -> int:
        return self.spec.schedule.steps

    def save_due(self, step: int) -> bool:
        every = self.spec.checkpoint.every_steps
        return step == self.last_step or (every is not None and step % every == 0)

    def eval_here(self, step: int) -> bool:
        """Whether the engines that roll out evaluate after this step."""
        return self.late is None and self.eval_due(step)

    def eval_due(self, step: int) -> bool:
        every = self.spec.eval.every_steps
        return every is not None and (step == self.last_step or step % every == 0)
