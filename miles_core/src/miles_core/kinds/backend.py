"""Backend: one rank of the trainer; synchronous."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from miles_core.types import Float32, RouteMode, TrainBatch, WeightBucket


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW and its schedule; every backend honours every field."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    schedule: Literal["constant", "linear", "cosine"]
    warmup_steps: int
    min_lr_ratio: float
    """Final learning rate as a fraction of `lr`."""
    total_steps: int
    """Optimizer steps of the whole run; the schedule ends there."""
    clip_grad_norm: float | None
    """Global L2 norm over all ranks and shards, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """The objective as each rank evaluates it on a micro-batch."""

    load: str
    """``module:function`` of the picked loss."""
    options: Mapping[str, Any] = field(default_factory=dict)
    entropy_coef: float = 0.0
    """Subtracts coef * entropy, weighted like the policy loss."""
    kl_coef: float = 0.0
    """Adds coef * KL to `ref_logprobs` in the loss; 0 when KL is off or in the reward."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    on_nonfinite: Literal["skip", "stop"] = "stop"
    """What a NaN or infinity in loss or gradient does; all ranks agree on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendContext:
    """What the executor tells a rank at creation. torch.distributed is already initialised when `world_size` > 1."""

    model_path: str
    device: str
    rank: int
    world_size: int
    seed: int
    optimizer: OptimizerSettings
    loss: LossSettings
    reference: bool
    """Keep a frozen copy of the initial policy and answer ``log_probs(..., model="reference")``."""
    routes: RouteMode = "off"
    """What the policy's forward passes do with `TrainBatch.routes`: ignore them, count where the own choice differs, or
    also replay them (tag `replays-routes`). Anything but off needs a model with MoE layers."""
    true_on_policy: bool = False
    """Compute the log-probs that the engine sampled with, bit for bit (tag `true-on-policy`)."""
    architecture: str | None = None
    """``module:attribute`` of the table that a plugin brings for this checkpoint (`kinds.architecture`), if any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteCounts:
    """(position, MoE layer) pairs of one scoring pass, summed over all ranks; a sequence's last position is in none.

    Sets are compared, not orders.
    """

    recorded: int
    """Pairs with a record."""
    unrecorded: int
    """Pairs without one; they take the trainer's own choice."""
    own_differs: int
    """Recorded pairs for which the trainer's own choice, in this very pass, is another set of experts."""
    used_differs: int
    """Recorded pairs whose token was sent to another set of experts; 0 under replay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Global figures of one optimizer step; equal on every rank."""

    values: Mapping[str, float]
    """``loss, grad_norm, lr, entropy``, ``kl`` when on, and each metric of the loss under its own name."""
    skipped: str | None = None
    """Why no update happened (non-finite loss or gradient), or None."""


class Backend(Protocol):
    """Created once per rank as ``Backend(options, context)``. All ranks call every method with the same arguments.

    Each rank is handed the whole update's batch and takes its own share, so that splitting is the backend's business
    and the gradient is that of ``sum(token_weights * per_token_loss)`` whatever the ranks and micro-batches.

    Options that need several ranks have a method ``on_one_rank()``, which returns them without what does: checkpoints
    are converted in one process, whatever layout the run has.
    """

    def log_probs(self, batch: TrainBatch, *, model: Literal["policy", "reference"] = "policy") -> Float32:
        """f32[N] log-prob of every trained token (`loss_mask`) given its prefix under temperature scaling.

        Without gradient or dropout. 0.0 outside the mask and at each sequence's first token. Complete on rank 0; other
        ranks may return anything of shape [N].
        """
        ...

    def route_counts(self) -> RouteCounts | None:
        """Of the latest ``log_probs(batch, model="policy")``; None before one, or with routes off (tag
        `replays-routes`)."""
        ...

    def train_step(self, batch: TrainBatch) -> StepMetrics:
        """One optimizer step; per token ``correction_weights * policy loss - entropy_coef * H + kl_coef * KL``."""
        ...

    def export(self, version: int) -> Iterator[WeightBucket]:
        """Buckets of the full weights under Hugging Face names in the serving dtype; ranks take part together.

        Every rank yields every bucket; or only what its pipeline stage holds, with `WeightBucket.holders`, where the
        transport lets each rank move what it owns (`disk-delta`).
        """
        ...

    def save(self, directory: Path) -> None:
        """Write parameters, optimizer and schedule so that `load` continues bit for bit, also at another world size."""
        ...

    def load(self, directory: Path) -> None: ...

    def save_hf(self, directory: Path) -> None:
        """Write a Hugging Face folder (safetensors, config, tokenizer)."""
        ...

    def offload(self) -> None:
        """Move state out of accelerator memory until `onload`; a no-op on CPU."""
        ...

    def onload(self) -> None: ...

    def close(self) -> None: ...
