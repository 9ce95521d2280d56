"""Turns a validated run-file into the settings of trainer ranks and engines. Pure functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from miles_core.capability import architecture_name
from miles_core.config.model_folder import ModelFolderError, read_model_folder
from miles_core.config.resolve import Resolved, ResolvedRun
from miles_core.kinds.backend import LossSettings, OptimizerSettings
from miles_core.kinds.executor import EngineSpec, TrainerSpec

Device = Literal["cpu", "cuda"]


def option_values(resolved: Resolved) -> dict[str, Any]:
    """The options of a capability that is a function, as keyword arguments."""
    return {} if resolved.options is None else dict(resolved.options.model_dump())


def choose_device(wanted: Literal["auto", "cpu", "cuda"]) -> Device:
    if wanted != "auto":
        return wanted
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def trainer_spec(run: ResolvedRun, device: Device) -> TrainerSpec:
    spec, backend = run.spec, run.one["backend"]
    return TrainerSpec(
        load=backend.capability.load,
        options=backend.options,
        world_size=spec.placement.trainer_ranks,
        model_path=spec.model.path,
        device=device,
        seed=spec.seed,
        optimizer=_optimizer(run),
        loss=_loss(run),
        reference=spec.objective.kl_coef > 0,
        routes=spec.rollout.routes,
        true_on_policy=spec.precision.true_on_policy,
        architecture=_architecture(run),
    )


def _architecture(run: ResolvedRun) -> str | None:
    """The table that an installed plugin provides for the checkpoint, found by the class that its config.json names."""
    try:
        model_class = read_model_folder(Path(run.spec.model.path)).architecture
    except ModelFolderError:
        return None  # the backend says what is wrong with the folder
    return run.architectures.get(architecture_name(model_class))


def engine_spec(run: ResolvedRun, device: Device, logs: Path | None = None) -> EngineSpec:
    spec, engine = run.spec, run.one["engine"]
    return EngineSpec(
        load=engine.capability.load,
        options=engine.options,
        count=spec.placement.engines,
        model_path=spec.model.path,
        context_length=spec.model.context_length,
        device=device,
        seed=spec.seed,
        routes=spec.rollout.routes != "off",
        true_on_policy=spec.precision.true_on_policy,
        log_dir=None if logs is None else str(logs.absolute()),
    )


def _optimizer(run: ResolvedRun) -> OptimizerSettings:
    settings, schedule = run.spec.optimizer, run.spec.schedule
    return OptimizerSettings(
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        schedule=settings.schedule,
        warmup_steps=settings.warmup_steps,
        min_lr_ratio=settings.min_lr_ratio,
        total_steps=schedule.steps * schedule.minibatches,
        clip_grad_norm=settings.clip_grad_norm,
    )


def _loss(run: ResolvedRun) -> LossSettings:
    objective, loss = run.spec.objective, run.one["loss"]
    return LossSettings(
        load=loss.capability.load,
        options=option_values(loss),
        entropy_coef=objective.entropy_coef,
        kl_coef=objective.kl_coef if objective.kl_in == "loss" else 0.0,
        kl_estimator=objective.kl_estimator,
        on_nonfinite=objective.on_nonfinite,
    )
