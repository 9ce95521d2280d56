"""Conformance kit for executors: ranks and engines behave alike wherever they are placed.

    class TestMine(ExecutorConformance):
        def make(self) -> Executor: return MyExecutor(MyOptions())

Set `ranks` to what the executor is to be tried with. Workers import `miles_core.testing.recording`.
"""

from __future__ import annotations

import numpy as np

from miles_core.kinds.backend import LossSettings, OptimizerSettings
from miles_core.kinds.executor import EngineSpec, TrainerSpec
from miles_core.testing.recording import RecordingOptions
from miles_core.types import TrainBatch

BACKEND = "miles_core.testing.recording:RecordingBackend"
ENGINE = "miles_core.testing.recording:RecordingEngine"

OPTIMIZER = OptimizerSettings(
    lr=1e-3,
    betas=(0.9, 0.95),
    eps=1e-8,
    weight_decay=0.0,
    schedule="constant",
    warmup_steps=0,
    min_lr_ratio=0.0,
    total_steps=1,
    clip_grad_norm=None,
)


def trainer_spec(
    *, world_size: int = 1, load: str = BACKEND, options: RecordingOptions | None = None, model_path: str = ""
) -> TrainerSpec:
    """A trainer over the recording backend."""
    return TrainerSpec(
        load=load,
        options=options or RecordingOptions(),
        world_size=world_size,
        model_path=model_path,
        device="cpu",
        seed=0,
        optimizer=OPTIMIZER,
        loss=LossSettings(load="miles_core.algorithms.losses:ppo_clip"),
        reference=False,
    )


def engine_spec(
    *, count: int = 1, load: str = ENGINE, options: RecordingOptions | None = None, model_path: str = ""
) -> EngineSpec:
    """Engines that record."""
    return EngineSpec(
        load=load,
        options=options or RecordingOptions(),
        count=count,
        model_path=model_path,
        context_length=None,
        device="cpu",
        seed=0,
    )


def tiny_batch(lengths: tuple[int, ...] = (3, 2)) -> TrainBatch:
    """A batch of made-up numbers: S = len(lengths), N = sum(lengths)."""
    total = sum(lengths)
    zeros = np.zeros(total, dtype=np.float32)
    return TrainBatch(
        lengths=np.asarray(lengths, dtype=np.int64),
        group_ids=np.zeros(len(lengths), dtype=np.int64),
        rewards=np.zeros(len(lengths), dtype=np.float32),
        temperatures=np.ones(len(lengths), dtype=np.float32),
        token_ids=np.arange(total, dtype=np.int32),
        loss_mask=np.ones(total, dtype=np.bool_),
        rollout_logprobs=zeros,
        versions=np.zeros(total, dtype=np.int64),
        advantages=zeros,
        token_weights=np.full(total, 1 / total, dtype=np.float32),
        correction_weights=np.ones(total, dtype=np.float32),
    )
